"""Words that a reader of technical English stumbles over do not stand in messages, docstrings and pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = (".md", ".py", ".j2", ".js", ".html", ".css", ".ipynb")
PLACES = ("README.md", "CHANGELOG.md", "docs", "bench", "src")

AVOIDED = {
    r"somebody|nobody": "no one, no process, or the passive",
    r"go(es|ing)? on|went on": "resume, continue",
    r"(said|says?|told) aloud": "reported",
    r"let(s|ting)? go": "release",
    r"keep(s|ing)? (\S+ ){1,3}company": "take part",
    r"(is|are|was|were) told": "is passed, is called with",
}
"""What is avoided, and what is written instead."""
ALLOWED: dict[str, tuple[str, ...]] = {"docs/concepts/words.md": tuple(AVOIDED)}
"""File -> the patterns that stand in it with a reason: the page that lists the avoided words."""


def texts() -> list[Path]:
    roots = [ROOT / place for place in PLACES]
    found = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [path for path in found if path.suffix in TEXTS]


def offences(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r} (instead: {instead})"
        for pattern, instead in AVOIDED.items()
        if pattern not in ALLOWED.get(name, ())
        for match in re.finditer(rf"\b({pattern})\b".replace(" ", r"\s+(?:# |\* )?"), text, re.IGNORECASE)
    ]


def test_no_avoided_word_stands_in_a_message_a_docstring_or_a_page() -> None:
    assert [offence for path in texts() for offence in offences(path)] == []
