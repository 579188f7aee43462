"""Curves that are drawn before a run is over: the files are those that one drawing at the end makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tunesmith.pipeline.run_pages import draw_ahead

from synthetic_runs import make_folder, make_run
from tunesmith.events import Event, RunEnded, StepDone
from tunesmith.pipeline import run_pages
from tunesmith.pipeline.results import draw_and_explain
from tunesmith.runs.journal import Journal
from tunesmith.runs.layout import RunDir


def write_run(folder: Path, events: list[Event]) -> RunDir:
    folder.mkdir(parents=True)
    make_folder(folder, events)
    return RunDir(folder)


@pytest.mark.parametrize("more", [False, True])
def test_curves_drawn_ahead_are_used_unless_points_were_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    events = make_run([0.5, 0.3, 0.15], [0.45, 0.40, 0.46], accuracy=[0.78, 0.85, 0.86])
    assert isinstance(events[-1], RunEnded)
    last = next(e for e in reversed(events) if isinstance(e, StepDone))
    added = [StepDone(last.step + 1, last.epoch, 0.1, 1.0, 0.0, 8, 100, 100, 0.1)] if more else []
    at_once = write_run(tmp_path / "one" / "run", [*events[:-1], *added, events[-1]])
    ahead = write_run(tmp_path / "two" / "run", events[:-1])
    expected = draw_and_explain(at_once)
    draw_ahead(ahead)
    with Journal(ahead.journal_file) as journal:
        for event in [*added, events[-1]]:
            journal.append(event)
    drawn: list[Any] = []
    real = run_pages.curve_pictures
    monkeypatch.setattr(run_pages, "curve_pictures", lambda curves: drawn.append(1) or real(curves))
    assert draw_and_explain(ahead) == expected
    assert len(drawn) == more
    assert ahead.curves_png.read_bytes() == at_once.curves_png.read_bytes()
