"""Files and modules that a page names are there: a page follows when they move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "tunesmith"
ROOTS = (ROOT, ROOT / "src", SRC, ROOT / "tests", ROOT / "bench")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
THEIRS = {"run_glue.py", "run_classification.py", "accuracy/accuracy.py", "trainer.py", "loop.py"}
"""Scripts of transformers and of a reader's own."""


@cache
def known_names() -> set[str]:
    """Every file of Python, by its name alone."""
    return {path.name for root in ("src", "tests", "bench") for path in (ROOT / root).rglob("*.py")}


def missing_in(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/.<*-])((?:[\w-]+/)*[\w-]+\.(?:py|sh))\b", text):
        if name not in THEIRS and name not in known_names() and not any((root / name).is_file() for root in ROOTS):
            yield name
    for name in re.findall(r"\b(?:from|import|-m) (tunesmith\.[a-z_.]+)|`(tunesmith\.[a-z_]+\.[a-z_.]+)", text):
        parts = (name[0] or name[1]).rstrip(".").split(".")[1:]
        places = [SRC.joinpath(*parts), SRC.joinpath(*parts[:-1])]
        if not any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
            yield ".".join(["tunesmith", *parts])


def test_every_file_and_module_that_a_page_names_is_there() -> None:
    found = {page.relative_to(ROOT).as_posix(): sorted(set(missing_in(page))) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}
