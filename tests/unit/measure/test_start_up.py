"""`tunesmith bench --start_up`: phases of a real process add up to its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tunesmith.config.schema import RunConfig
from tunesmith.errors import WorkerError
from tunesmith.measure import start_up
from tunesmith.measure.start_up import Timed, Took, format_phases, phases_to_json, run_timed

WORKS = """
import logging, sys, time
from tunesmith.cli.timed_command import PipeHandler
from tunesmith.runs.environment import milestones, reach
logging.getLogger("tunesmith").setLevel(logging.INFO)
milestones.addHandler(PipeHandler(int(sys.argv[1])))
reach("options")
time.sleep(0.3)
reach("data")
sum(i * i for i in range(2_000_000))
reach("training")
"""


def test_the_phases_of_a_process_add_up(tmp_path: Path) -> None:
    found = run_timed(lambda pipe: [sys.executable, "-c", WORKS, str(pipe)], tmp_path / "log")
    assert list(found) == ["options", "data", "training", "end"]
    assert found["data"].clock >= 0.3 > 0.1 > found["data"].processor
    assert found["training"].processor > 0.02
    timed = Timed("train", [found, {**found, "data": Took(9.0, 1.0)}])
    assert timed.total().clock == pytest.approx(sum(t.clock for t in found.values()) - found["data"].clock + 9.0)
    assert timed.total(without=("training",)).clock == pytest.approx(timed.total().clock - found["training"].clock)
    assert timed.first < timed.total().clock
    assert "9.00 (1.00)" in format_phases([timed])
    assert json.loads(json.dumps(phases_to_json([timed])))["commands"]["train"]["phases"]["data"]["clock"] == 9.0


def test_a_command_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"ended with 1: ValueError: no such thing"):
        run_timed(lambda pipe: [sys.executable, "-c", "raise ValueError('no such thing')"], tmp_path / "log")


@pytest.mark.parametrize(("filled_by", "trains", "scripts"), [(None, 4, 2), (5, 3, 1)])
def test_a_script_that_takes_long_has_fewer_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled_by: int | None, trains: int, scripts: int
) -> None:
    """Of both, the round that fills the caches comes in addition where no short run does that."""
    monkeypatch.setattr(start_up, "run_timed", lambda words, log: {"end": Took(1.0, 1.0)})
    monkeypatch.setattr(start_up, "_words", lambda *given: lambda pipe: [])
    options = {"kinds": ("train", "script"), "rounds": 3, "folder": tmp_path, "say": str, "filled_by": filled_by}
    timed = start_up.time_commands(RunConfig(), (("text",), "label"), script_rounds=1, **options)
    assert [len(one.rounds) for one in timed] == [trains, scripts]
    assert [len(one.counted) for one in timed] == [3, 1]
