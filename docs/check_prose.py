"""Check README, docs, help and messages for phrases that readers stumble over: python docs/check_prose.py

Quotations, code blocks and inline code are skipped. Exits with 1 if a phrase is found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = {
    r"\bbeside\b": "compared with, in addition to",
    r"\b(anew|afresh|for ever)\b": "again, from scratch, forever",
    r"\b(rows|examples|ms|seconds|points|steps) an? (label|class|step|row|second|epoch|run|batch)\b": "per",
    r"\b(is|are|was|were) (told|said)\b": "reported, logged",
    r"\bof (its|their|our|your) own\b": "separate, or drop it",
    r"\bof (ours|the user's)\b": "our, the user's ...",
    r"\bchose nothing\b": "held-out",
    r"\bso many\b": "this many",
    r"\bnot finite\b": "NaN or infinite",
    r"\b(left open|leave open|leaves open)\b": "unset",
    r"\basked for\b": "requested, set",
    r"\bin one order\b": "deterministic",
    r"\bthe house\b": "the codebase",
    r"\b(labelled|normalise\w*|initialise\w*|colou?red by|behaviour|honour\w*|favour\w*|maths)\b": "US spelling",
    r"\bfrom \d+ on\b": "or more",
    r"\b(stands|stand|lies) in\b": "is in, is stored in",
    r"\bspeed-ups?\b": "speedup",
}
FOUND = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in PATTERNS.items()]


def page_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose lines of a Markdown page."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(("```", "<!-- check", "-->")):
            in_code = line.startswith(("```", "<!-- check")) and not in_code
        elif not in_code and not line.startswith((">", "<!--")):
            yield number, re.sub(r'`[^`]*`|"[^"]*"|\]\([^)]*\)', "", line)


def source_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the string literals (docstrings, help, messages) of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, re.sub(r"`[^`]*`", "", line)


def main() -> int:
    """Print every hit as file:line; return 1 if there is one."""
    research = ROOT / "docs" / "research"
    pages = [p for p in sorted((ROOT / "docs").rglob("*.md")) if not p.is_relative_to(research)]
    texts = [(p, page_lines(p)) for p in [*sorted(ROOT.glob("*.md")), *pages]]
    texts += [(p, source_lines(p)) for p in sorted((ROOT / "src").rglob("*.py"))]
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} (write: {instead})"
        for path, lines in texts
        for number, line in lines
        for pattern, instead in FOUND
        for match in pattern.finditer(line)
    ]
    print("\n".join(hits) or "No hits.")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
