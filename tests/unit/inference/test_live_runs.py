"""The live state of a run equals its journal, whatever happens to the file while it is followed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tunesmith.events import NonFinite, Note, Resumed, RunEnded, RunStarted, StepDone
from tunesmith.inference.live_runs import LiveRun, encode_message
from tunesmith.runs.curves import load_curves
from tunesmith.runs.event_log import Journal, peek_journal, truncate_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.lock import RunLock


def write(path: Path, events) -> None:
    with Journal(path / "journal.jsonl") as journal:
        for event in events:
            journal.append(event)


def line(panels, key: str, name: str) -> dict[int, float | None]:
    panel = next(p for p in panels if p["key"] == key)
    found = next(part for part in panel["lines"] if part["name"] == name)
    return dict(zip(found["x"], found["y"], strict=True))


def test_numbers_pushed_to_the_page_equal_the_journals_at_every_moment(tmp_path: Path, synthetic) -> None:
    events = synthetic.make_run([0.5, 0.3, 0.2], [0.45, 0.4, 0.42], accuracy=[0.7, 0.8, 0.8], steps_per_epoch=40)
    live = LiveRun(RunDir(tmp_path))
    for begin in range(0, len(events), 17):
        write(tmp_path, events[begin : begin + 17])
        assert live.poll()
        known = load_curves(tmp_path)
        panels = live.snapshot()["panels"]
        losses = line(panels, "loss", "training")
        assert list(losses) == known.train_loss.step.tolist()
        np.testing.assert_allclose(list(losses.values()), known.train_loss.value, rtol=1e-5)
        assert live.snapshot()["step"] == known.last_step
    assert line(panels, "metric", "validation") == {40: 0.7, 80: 0.8, 120: 0.8}
    assert not live.poll()
    assert live.snapshot()["status"] == "finished"


def test_a_run_that_goes_back_to_a_checkpoint_is_drawn_once(tmp_path: Path, synthetic) -> None:
    events = synthetic.make_run([0.5, 0.3], [0.45, 0.4], steps_per_epoch=20, ended=None)
    write(tmp_path, events)
    live = LiveRun(RunDir(tmp_path))
    live.poll()
    truncate_journal(tmp_path / "journal.jsonl", 20)
    again = [
        Resumed(20, "checkpoint-20"),
        *(StepDone(s, s / 20, 9.0, 1.0, 1e-5, 8, 80, 80, 0.1) for s in range(21, 26)),
    ]
    write(tmp_path, again)
    assert live.poll()
    losses = line(live.snapshot()["panels"], "loss", "training")
    assert list(losses) == list(range(1, 26))
    assert losses[25] == 9.0
    assert live.snapshot()["resumed_at"] == [20]


def test_steps_that_are_not_finite_are_gaps_and_valid_json(tmp_path: Path, synthetic) -> None:
    write(tmp_path, synthetic.make_run([0.5], [0.5], steps_per_epoch=30, nan_after=20))
    live = LiveRun(RunDir(tmp_path))
    live.poll()
    state = live.snapshot()
    assert line(state["panels"], "loss", "training")[21] is None
    assert state["findings"][0]["code"] == "diverged"
    assert state["status"] == "failed"
    message = encode_message("run", state).split(b"data: ", 1)[1]
    json.loads(message, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_that_goes_on_is_never_told_that_it_stopped_too_early(tmp_path: Path, synthetic) -> None:
    falling = {"train": [0.60, 0.52, 0.42], "validation": [0.59, 0.52, 0.44], "accuracy": [0.69, 0.74, 0.80]}
    write(tmp_path, synthetic.make_run(**falling, planned_epochs=9, ended=None))
    live = LiveRun(RunDir(tmp_path))
    with RunLock(RunDir(tmp_path).lock_file):
        live.poll()
        assert live.snapshot()["status"] == "running"
        assert live.snapshot()["findings"][0]["code"] == "still_learning"
    assert live.poll(), "the end of the process changes what is shown"
    assert live.snapshot()["findings"][0]["code"] == "stopped_too_early"


def test_no_text_can_end_a_message() -> None:
    message = encode_message("run", {"note": "a\n\ndata: evil\r\n\u2028 é"})
    assert message.count(b"\n") == 3
    assert json.loads(message.split(b"data: ", 1)[1])["note"].startswith("a\n\ndata")


@pytest.mark.parametrize(
    ("tail", "ended"),
    [
        ([RunEnded(5, "completed")], "completed"),
        ([RunEnded(5, "SIGTERM"), Resumed(5, "checkpoint-5")], None),
        ([RunEnded(5, "NumericsError")], "NumericsError"),
        ([Note(5, "x"), NonFinite(5, "loss", "loss", ())], None),
    ],
)
def test_only_a_last_word_is_an_end(tmp_path: Path, tail, ended: str | None) -> None:
    first = [RunStarted("r", 0, 10, 10.0, 1.0, 80), StepDone(1, 0.1, None, None, 1e-5, 8, 8, 8, 0.1)]
    write(tmp_path, [*first, *tail])
    peek = peek_journal(tmp_path / "journal.jsonl")
    assert peek.ended == ended
    assert peek.loss is None
    assert peek.num_steps == 10
