"""The blocks of every documentation page run from top to bottom in an empty folder."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from docs.pages import ROOT, RUNNABLE, read_blocks, run_page

PAGES = [
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in p.parts),
    *([ROOT / "README.md"] if (ROOT / "README.md").is_file() else []),
]
"""Decisions are records: their commands are not kept working."""


def has_work(page: Path) -> bool:
    return any(b.kind in RUNNABLE and not b.not_run for b in read_blocks(page))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [p for p in PAGES if has_work(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_page_blocks_run_top_to_bottom(page: Path, tmp_path: Path) -> None:
    from matplotlib import pyplot

    try:
        assert run_page(page, tmp_path) > 0
    finally:
        pyplot.close("all")
        gc.collect()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    import re

    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "images/" not in target:  # a separate script takes the screenshots
            assert (page.parent / target).exists(), target


def test_every_course_page_is_tested() -> None:
    course = {p for p in PAGES if p.parent.name == "course" and p.name != "README.md"}
    assert len(course) >= 8
    assert all(has_work(p) for p in course)
