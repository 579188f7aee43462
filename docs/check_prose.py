"""Check README, docs, help and messages for phrases that readers stumble over: python docs/check_prose.py

Covers all Markdown pages, the `--help_all` output of every command, and docstrings, messages and comments in src, bench and tests
(in tests without strings, which may be test data). Code blocks, inline code and quotations are skipped. Exits with 1 if a phrase
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
UNITS = "rows|examples|ms|seconds|points|steps|tokens|labels|bytes|lines"
PATTERNS = {
    r"\bbeside\b": "compared with, in addition to",
    r"\b(anew|afresh|for ever)\b": "again, from scratch, forever",
    rf"\b({UNITS}) an? (label|class|step|row|second|epoch|run|batch|line|token)\b": "per",
    r"\b(is|are|was|were) (told|said)\b": "reported, logged",
    r"\bof (its|their|our|your|his) own\b": "separate, or drop it",
    r"\bof (ours|the user's)\b": "our, the user's ...",
    r"\bchose nothing\b": "held-out",
    r"\bso many\b": "this many",
    r"\bnot finite\b": "NaN or infinite",
    r"\b(left open|leave open|leaves open)\b": "unset",
    r"\basked for\b": "requested, set",
    r"\bin one order\b": "deterministic",
    r"\bthe house\b": "the codebase",
    r"\b(labelled|normalis\w*|initialis\w*|colou?red by|colours?|behaviour|honour\w*|favour\w*|maths|neighbours?)\b": "US spelling",
    r"\bfrom [\d,]+ (\w+ )?on\b": "or more",
    r"\b(stands|stand|lies) in\b": "is in, is stored in",
    r"\bspeed-ups?\b": "speedup",
    r"\b(learnt|mended|thereof|hitherto|gives away|give away)\b": "learned, fixed, ...",
    r"\bas ever\b": "as usual",
}
IN_TEXTS = {
    r"\bholds\b": "contains, uses",
    r"\bgives\b": "returns, prints",
    r"\b(unless|except|only|and|but|than|,) where\b": "if, when",
    r"\b(cut short|is cut|are cut)\b": "truncated",
    r"\b(is|are|was|were) given\b": "set, passed",
    r"\bgive (another|the same command|one|a new)\b": "set, pass, run",
    r"\balone\b(?! does)": "only",
    r"\ball the same\b": "anyway",
    r"\bat once\b": "immediately, together",
    r"\bleft out\b": "omitted, excluded",
}
"""Patterns for pages, help and messages, which users read; docstrings and comments may use these words."""


def compile_patterns(patterns: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Return compiled patterns with what to write instead."""
    return [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in patterns.items()]


FOUND, STRICT = compile_patterns(PATTERNS), compile_patterns(PATTERNS | IN_TEXTS)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)")


def page_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose lines of a Markdown page."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(("```", "<!-- check", "-->")):
            in_code = line.startswith(("```", "<!-- check")) and not in_code
        elif not in_code and not line.startswith(">"):
            yield number, QUOTED.sub("", line)


def source_lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings, messages and comments of a Python file; the last value is true for messages."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, re.sub(r"`[^`]*`", "", line), id(node) not in docstrings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", "", token.string), False


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
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("*.md"))]
    texts = [(f"{p.relative_to(ROOT)}:{number}", line, STRICT) for p in pages for number, line in page_lines(p)]
    for path in sorted(path for folder in ("src", "bench", "tests") for path in (ROOT / folder).rglob("*.py")):
        name, folder = path.relative_to(ROOT), path.relative_to(ROOT).parts[0]
        texts += [
            (f"{name}:{n}", line, STRICT if message and folder == "src" else FOUND)
            for n, line, message in source_lines(path)
            if not message or folder != "tests"
        ]
    texts += [(command, line, STRICT) for command, line in help_lines()]
    hits = [
        f"{place}: {match[0]!r} (write: {instead})"
        for place, line, patterns in texts
        for pattern, instead in patterns
        for match in pattern.finditer(line)
    ]
    print("\n".join(hits) or "No hits.")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
