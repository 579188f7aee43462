"""One bad run folder beside a good one: a row that says so, an answer to every request, and the good run as before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tunesmith.inference.live_runs import RunIndex
from tunesmith.runs.folder import RunDir

STEP = (
    b'{"event": "StepDone", "step": 1, "epoch": 0.1, "loss": %s, "grad_norm": 1.0, "learning_rate": 1e-5, '
    b'"examples": 8, "tokens": 9, "padded_tokens": 9, "seconds": 0.1}\n'
)
JOURNALS = {
    "a loss of +-e": STEP % b"+-e",
    "a text for a number": STEP % b'"low"',
    "nested": b'{"event": "Diagnosed", "step": 1, "finding": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a time that is a text": b'{"event": "RunStarted", "run_id": "r", "step": 0, "num_steps": 9, "steps_per_epoch": 3.0,'
    b' "num_epochs": 3.0, "train_rows": 8, "time": "now"}\n',
    "metrics that are a list": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "validation", "metrics": [], "n": 4}\n',
    "2 MB without an end": b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", JOURNALS)
def test_a_damaged_journal_is_a_row_that_says_so(served: Any, runs: Path, name: str) -> None:
    bad = RunDir(runs / "beta")
    bad.journal_file.write_bytes(JOURNALS[name])
    rows = {row.id: row for row in RunIndex(runs).rows()}
    assert rows["beta"].status == "damaged"
    assert rows["beta"].problem
    assert rows["alpha"].problem is None
    assert_served(served)


def test_infinities_are_gaps_and_no_damage(served: Any, runs: Path) -> None:
    bad = RunDir(runs / "beta")
    bad.journal_file.write_bytes(STEP % b"Infinity" + (STEP % b"NaN").replace(b'"step": 1', b'"step": 2'))
    assert {row.id: row.problem for row in RunIndex(runs).rows()} == {"alpha": None, "beta": None}
    assert_served(served, report=200)


METRICS = ("[" * 100_000, '{"test": {"accuracy": {"value": NaN, "low": "x", "high": []}}}')


@pytest.mark.parametrize("text", METRICS, ids=["nested", "not finite"])
def test_a_damaged_metrics_file_does_not_take_the_list_down(served: Any, runs: Path, text: str) -> None:
    RunDir(runs / "beta").metrics_file.write_text(text)
    assert_served(served)


@pytest.mark.parametrize("name", ["journal_file", "config_file", "metrics_file", "data_summary_file", "lock_file"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_hangs_nothing(served: Any, runs: Path, name: str, kind: str) -> None:
    file: Path = getattr(RunDir(runs / "beta"), name)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    if name == "journal_file":
        assert {row.id: bool(row.problem) for row in RunIndex(runs).rows()} == {"alpha": False, "beta": True}
    assert_served(served)


def assert_served(served: Any, report: int | None = None) -> None:
    """Every page of both runs answers, and the list shows both."""
    status, _, body = served.ask("GET", "/")
    assert status == 200
    assert b"alpha" in body
    assert b"beta" in body
    for path in ("/runs/beta", "/runs/beta/events", "/runs/beta/report"):
        status = served.ask("GET", path)[0]
        assert status in (200, 404, 409), path
    assert report in (None, status)
    assert served.ask("GET", "/runs/alpha")[0] == 200
