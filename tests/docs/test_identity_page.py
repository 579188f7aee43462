"""docs/reliability.md names every option and argument that a resume compares or lets differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.session.planning import INERT
from tunesmith.trainer.run_identity import MATHS, OVERRIDES, REPORTED

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.parametrize("names", [INERT, MATHS, REPORTED, OVERRIDES], ids=["inert", "maths", "reported", "overrides"])
def test_every_name_stands_on_the_page(names: tuple[str, ...]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## The identity of a run")[2]
    assert [name for name in sorted(names) if f"`{name}`" not in section] == []
