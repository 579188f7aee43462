"""Saves in a background thread, and an event log that does not match its checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patience import patient
from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import Note, RunStarted, SafePoint, Saved, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.training.run_writer import RunWriter
from unit.training.test_resume import ROWS, make_keeper, run


class Slow:
    """A run writer whose background saves wait for `go`."""

    def __init__(self, folder: Path) -> None:
        self.go, self.saved = threading.Event(), list[int]()
        self.writer, _ = make_keeper(folder)
        self.writer.background_bytes = 0
        self.writer.describe = lambda tmp: self._wait()
        self.writer.listeners.append(lambda e: self.saved.append(e.step) if isinstance(e, Saved) else None)
        self.writer.begin(RunStarted("run", 0, 24, 1, 1, ROWS))

    def _wait(self) -> None:
        assert self.go.wait(patient(20))

    def step(self, step: int) -> None:
        self.writer.state.step = step
        with torch.no_grad():
            for parameter in self.writer.state.model.parameters():
                parameter.fill_(step)
        self.writer.on(SafePoint(step))


def first_weight(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["classifier.bias"][0])


def test_background_save_contains_the_weights_of_its_step(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.step(1)
    with torch.no_grad():
        slow.writer.state.model.classifier.bias.fill_(99)  # type: ignore[operator]
    assert slow.saved == []
    slow.go.set()
    slow.step(2)
    slow.writer.end("completed")
    assert slow.saved == [1, 2]
    assert [first_weight(slow.writer.run.checkpoint(step)) for step in (1, 2)] == [1, 2]


def test_failed_background_save_is_raised_at_the_next_save(tmp_path: Path) -> None:
    slow = Slow(tmp_path)

    def fail(tmp: Path) -> None:
        raise OSError(28, "No space left on device")

    slow.writer.describe = fail
    slow.step(1)
    with pytest.raises(ResourceError, match=r"checkpoint-1: cannot be written: No space left"):
        slow.step(2)
    slow.writer.end("ResourceError")
    assert slow.writer.run.checkpoints() == []


def test_signal_while_waiting_does_not_lose_the_save(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.step(1)

    def arrived(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, arrived)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            slow.writer.save(2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    slow.go.set()
    slow.writer.end("completed")
    assert slow.saved == [1]


def cut_log(writer: RunWriter, steps: int) -> None:
    lines = writer.run.journal_file.read_bytes().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if f'"StepDone", "step": {steps + 1},'.encode() in line)
    writer.run.journal_file.write_bytes(b"".join(lines[:end]))


def test_event_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    first, batches = make_keeper(tmp_path, save_every=4)
    run(first, batches, until=8)
    cut_log(first, 5)
    before = first.run.journal_file.read_bytes()
    second, batches = make_keeper(tmp_path, save_every=4)
    with pytest.raises(CheckpointError, match=r"journal\.jsonl: ends after step 5, .* steps 6 to 8 are missing"):
        run(second, batches)
    assert first.run.journal_file.read_bytes() == before


def test_deleted_event_log_is_noted_and_can_be_resumed_twice(tmp_path: Path) -> None:
    first, batches = make_keeper(tmp_path, save_every=4)
    run(first, batches, until=8)
    first.run.journal_file.unlink()
    for until in (8, 9, None):
        writer, batches = make_keeper(tmp_path, save_every=4)
        run(writer, batches, until=until)
    events: list[Any] = read_journal(first.run.journal_file)
    assert any(isinstance(e, Note) and "was gone" in e.text for e in events)
    steps = [e.step for e in events if isinstance(e, StepDone)]
    assert steps == list(range(9, writer.plan.num_steps + 1))
