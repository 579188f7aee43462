"""`tunesmith bench --start_up`: phases of a real process add up to its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tunesmith.errors import WorkerError
from tunesmith.measure.start_up import Timed, Took, format_phases, phases_to_json, run_timed

WORKS = """
import logging, sys, time
from tunesmith.cli.timed_command import PipeHandler
from tunesmith.run.environment import milestones, reach
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
