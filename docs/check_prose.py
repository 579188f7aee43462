"""Check README, docs, help and messages for phrases that readers stumble over: python docs/check_prose.py

Covers all Markdown pages, the `--help_all` output of every command, and docstrings, messages, comments and test names in src, bench
and tests (in tests without strings, which may be test data). Code blocks, inline code and quotations are skipped. Exits with 1 if a phrase
is found.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNITS = "rows?|examples?|ms|seconds?|points?|steps?|tokens?|labels|bytes?|lines?|times"
GROUPS = (
    "label|class|step|row|second|epoch|run|batch|line|token|file|split|fold|trial|rank|device|example|text|minute|hour"
)
PATTERNS = {
    r"\bbeside\b": "compared with, in addition to",
    r"\b(anew|afresh|for ever|as ever)\b": "again, from scratch, forever, as usual",
    r"\bat once\b": "immediately, together",
    rf"\b({UNITS}) an? ({GROUPS})\b": "per",
    r"\b(is|are|was|were|be|been) (told|said)\b": "reported, logged",
    r"\bof (its|their|our|your|his) own\b": "separate, or drop it",
    r"\bof the user's\b": "the user's ...",
    r"\b(times|than|as|by|of|to|from|with) ours\b": "tunesmith's",
    r"\b(faster|slower|better|worse|larger|smaller|first|one) of both\b": "of the two",
    r"(?-i:(^|[.:;] )(What|Where|Of|Inside),? )(?![^.]*\?)": "a noun or a verb first",
    r"\b(unless|except|only|and|but|than|None|NaN|empty|;) where\b": "if, when",
    r"\bholds\b(?! (out|the lock|a lock)\b)": "contains, uses",
    r"\bgives\b": "returns, prints, has",
    r"\balone\b(?! does)": "only",
    r"\b(when|if|unless|is|are|was|were|be|not|as|the) given\b(?! label)": "set, passed",
    r"\btakes (any|only|no|both|several)\b(?! (part|seconds))": "accepts, supports",
    r"\b(stands?|lies?) (in|on|behind|there|over)\b": "is in, is stored in",
    r"\b(left.out|leave out|leav(e|es|ing) (\S+ ){1,3}out)\b": "omitted, held-out",
    r"\b(chose nothing|to choose on|nothing of (it|them))\b": "held-out, development",
    r"\bso (many|few)\b": "this many, too few",
    r"\b(surest of|(is|are) not concerned|worth its time|(in|for) company|goes by|hands (to|over))\b": "plain words",
    r"\b(says?|saying) (more |little |nothing |something )?of\b": "about, reveals",
    r"\b(otherwise than|(is|are) not what)\b": "different from",
    r"\b(all|every|none|nothing|anything|rank 0) (\w+ )?but\b": "except, other than",
    r"\b(a|each|every|one|another|the first|the best|the last) (try|look|suspect)\b": "trial, evaluation, suspected label error",
    r"\b(is|are|was|were|be) cut\b": "truncated",
    r"\b(not built in|holds? up)\b": "not supported, delay",
    r"\b(equal seconds|it is for (one|two|a single))\b": "equal time, it requires",
    r"\bother bits\b": "not bit-identical",
    r"\b(of|with) another (size|value|kind|type|label|version|config|name)\b": "a different",
    r"\b(not finite|something that is not a number)\b": "NaN or infinite",
    r"\b(left open|leave open|leaves open)\b": "unset",
    r"\basked for\b": "requested, set",
    r"\bin one order\b": "deterministic",
    r"\b(the|this|a|each|both|every|one|two|four) (house|room|doors?|keeper|bank)\b": "codebase, package, entry point, ...",
    r"\b(best constant|captured steps?|model soup|sealed|suspects|floors?)\b": "the standard term of STYLE.md",
    r"(\A|\| )the same[,|:]": "a noun",
    r"\b(since then|as of today)\b": "write in the present tense",
    r"\b\w*(labell|modell|cancell(?!ation)|normalis|initialis|optimis(?!tic)|tokenis|summaris|organis|recognis|quantis|serialis|minimis)\w*": "US spelling",
    r"\b((colour|behaviour|honour|favour|neighbour|centre|artefact)\w*|maths|analys(e|ed|ing)|grey|towards|licence|catalogue)\b": "US spelling",
    r"\bfrom [\d,]+ (\w+ )?on\b": "or more",
    r"\bspeed-ups?\b": "speedup",
    r"\b(learnt|mended|thereof|hitherto|gives? away|whilst)\b": "learned, fixed, ...",
}
IN_TEXTS = {
    r"(?-i:(^|[.:;,] |\b(or|and) ))give\b(?! up)": "set, pass, run",
    r"(?-i:(^|[.:;] ))Give\b": "Set, pass, run",
    r"\bcut short\b": "truncated",
    r"\bin common\b": "shared",
    r"\ball the same\b": "anyway",
    r"(\A|\| ?)(what|where) (?![^.|]*\?)": "a noun or a verb first",
    r"\b(differs? otherwise|started with something else)\b": "differs, with different settings",
}
"""Patterns for pages, help and messages, which users read; docstrings and comments may use these words."""
MOST_NAME_CHARACTERS = 60
"""Length of a test name, at most."""


def compile_patterns(patterns: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Return compiled patterns with what to write instead. A space also matches a line break."""
    return [(re.compile(pattern.replace(" ", r"\s+"), re.I | re.M), instead) for pattern, instead in patterns.items()]


FOUND, STRICT = compile_patterns(PATTERNS), compile_patterns(PATTERNS | IN_TEXTS)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)")
MARKUP = re.compile(r"\{[{%#].*?[}%#]\}|<[^>]*>|`[^`]*`")


def page_paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a Markdown page without code, with the number of their first line."""
    in_code, start, lines = False, 0, list[str]()
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        code = line.startswith(("```", "<!-- check", "-->"))
        if code:
            in_code = line.startswith(("```", "<!-- check")) and not in_code
        if code or in_code or line.startswith(">") or not line.strip():
            if lines:
                yield start, "\n".join(lines)
            lines = []
            continue
        start = start if lines else number
        lines.append(QUOTED.sub("", line))


def source_texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings, messages and comments of a Python file; the last value is true for messages."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`]*`", "``", node.value), id(node) not in docstrings
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != start + len(lines):
                yield start, "\n".join(lines), False
                lines = []
            start = start if lines else token.start[0]
            lines.append(re.sub(r"`[^`]*`", "``", token.string.lstrip("# ")))
    if lines:
        yield start, "\n".join(lines), False


def test_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each test."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name


def help_lines() -> Iterator[tuple[str, str]]:
    """Yield every command and the sentences of its help, as a user sees them."""
    sys.path.insert(0, str(ROOT / "src"))
    from tunesmith.cli.main import VERBS, main as command

    verbs = [verb for group in VERBS.values() for verb in group]
    for words in [[], *([verb] for verb in verbs)]:
        flag = "--help_all" if words in (["train"], ["search"], ["plan"]) else "--help"
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            command([*words, flag])
        for sentence in " ".join(shown.getvalue().split()).split(". "):
            yield " ".join(["tunesmith", *words, flag]), re.sub(r"`[^`]*`", "", sentence)


def main() -> int:
    """Print every hit with its place; return 1 if there is one."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    texts = [(p.relative_to(ROOT), number, text, STRICT) for p in sorted(pages) for number, text in page_paragraphs(p)]
    for path in sorted((ROOT / "src").rglob("*.j2")):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        texts += [(path.relative_to(ROOT), number, MARKUP.sub("", line), STRICT) for number, line in lines]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for path in [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py")), *tests]:
        name, folder = path.relative_to(ROOT), path.relative_to(ROOT).parts[0]
        texts += [
            (name, number, text, STRICT if message and folder == "src" else FOUND)
            for number, text, message in source_texts(path)
            if not message or folder != "tests"
        ]
        texts += [(name, number, test.replace("_", " "), FOUND) for number, test in test_names(path)]
    texts += [(Path(command), 1, line, STRICT) for command, line in help_lines()]
    hits = [
        f"{place}:{number + text.count(chr(10), 0, match.start())}: {' '.join(match[0].split())!r} (write: {instead})"
        for place, number, text, patterns in texts
        for pattern, instead in patterns
        for match in pattern.finditer(text)
    ]
    hits += [
        f"{path.relative_to(ROOT)}:{number}: {test} has {len(test)} characters"
        for path in tests
        for number, test in test_names(path)
        if len(test) > MOST_NAME_CHARACTERS
    ]
    print("\n".join(hits) or "No hits.")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
