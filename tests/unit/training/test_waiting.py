"""Saves that come faster than the disk takes them: steps do not wait, and what is published is what is needed, in order."""

from __future__ import annotations

import re
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patience import patient
from tunesmith.errors import NumericsError, StoppedBySignal, TunesmithError
from tunesmith.events import Improved, RunStarted, SafePoint, Saved
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import checkpoint_step
from tunesmith.runs.manifest import read_manifest, verify
from tunesmith.training import aside as aside_module
from tunesmith.training import run_writer as keeper_module
from tunesmith.training.aside import Aside
from tunesmith.training.checkpoint import OPTIMIZER, WEIGHTS, capture
from tunesmith.training.schedule import Calendar
from tunesmith.training.stopping import BestSoFar
from unit.training.test_resume import ROWS, make_keeper


class Trial:
    """A keeper on a device that has room, whose steps are made by hand: after step n every weight is n.

    `hold(n)` lets the write of step n wait for `go(n)`; `clock` is the time that the thread and its pauses are measured with.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, keep: int, steps: int, patience: int | None):
        self.room, self.clock, self.broken = True, 100.0, set[int]()
        self.gates: dict[int, threading.Event] = {}
        self.begun: dict[int, threading.Event] = defaultdict(threading.Event)
        self.saved: list[int] = []
        monkeypatch.setattr(keeper_module, "has_device_room", lambda device, size: self.room)
        monkeypatch.setattr(keeper_module, "capture", copy_of_the_moment)
        monkeypatch.setattr(aside_module, "time", SimpleNamespace(perf_counter=lambda: self.clock))
        self.keeper, _ = make_keeper(folder, patience=patience)
        self.keeper.plan = replace(self.keeper.plan, num_steps=steps, save=Calendar("steps", 10))
        self.keeper.keep_checkpoints, self.keeper.aside_from, self.keeper.describe = keep, 0, self.write
        self.keeper.listeners.append(lambda e: self.saved.append(e.step) if isinstance(e, Saved) else None)
        self.keeper.begin(RunStarted("run", 0, steps, 1, 1, ROWS))

    def write(self, tmp: Path) -> None:
        found = re.search(r"checkpoint-(\d+)", tmp.name)
        assert found
        step = int(found[1])
        self.begun[step].set()
        if step in self.gates and not self.gates[step].wait(patient(20)):
            raise AssertionError(f"the run waited for the checkpoint of step {step}")
        if step in self.broken:
            raise OSError(5, "as the test asked")

    def hold(self, step: int) -> None:
        self.gates[step] = threading.Event()

    def go(self, step: int, *, ended: bool = True) -> None:
        self.gates[step].set()
        future = next(job for number, job in self.keeper._aside._jobs if number == step)
        if ended:
            future.exception(patient(20))

    def go_soon(self, step: int) -> None:
        threading.Timer(0.2, self.gates[step].set).start()

    def step(self, step: int, *, improved: bool = False) -> None:
        """A step, its evaluation and its safe point."""
        state = self.keeper.state
        state.step = step
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.fill_(step)
        waited = state.progress.evaluations_without_gain + 1
        state.progress = (
            BestSoFar(1.0, step, 0) if improved else replace(state.progress, evaluations_without_gain=waited)
        )
        if improved:
            self.keeper.on(Improved(step, "loss", 1.0))
        self.keeper.on(SafePoint(step))

    def on_disk(self) -> list[int]:
        return [checkpoint_step(folder) for folder in self.keeper.run.checkpoints()]

    def waits(self) -> int | None:
        return None if self.keeper._waiting is None else self.keeper._waiting.step

    def end(self) -> None:
        """The end of a run; what is on disk is whole and holds the weights of its step, best/ those of the best one."""
        keeper = self.keeper
        with keeper.best_weights() as best:
            if best is not None:
                assert weight_in(best) == keeper.state.progress.step
        keeper.end("completed")
        for folder in keeper.run.checkpoints():
            verify(folder)
            assert weight_in(folder) == checkpoint_step(folder)
        if keeper.state.progress.step is not None:
            verify(keeper.run.best)
            assert read_manifest(keeper.run.best)["step"] == keeper.state.progress.step
            assert weight_in(keeper.run.best) == keeper.state.progress.step
        assert [e.step for e in read_journal(keeper.run.journal_file) if isinstance(e, Saved)] == self.saved
        assert self.saved == sorted(self.saved)


def copy_of_the_moment(state: Any, identity: Any, buffers: Any, *, stays: bool) -> Any:
    """What a GPU does: a copy that is not in the buffers."""
    found = capture(state, identity, None if stays else buffers)
    assert found is not None
    return found.copied({}) if stays else found


def weight_in(folder: Path) -> int:
    found = {float(value) for tensor in load_file(folder / WEIGHTS).values() for value in (tensor.min(), tensor.max())}
    assert len(found) == 1, found
    return int(found.pop())


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Trial] = []

    def make(*, keep: int = 1, steps: int = 30, patience: int | None = None) -> Trial:
        made.append(Trial(tmp_path, monkeypatch, keep=keep, steps=steps, patience=patience))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates.values():
            gate.set()
        one.keeper.close()


@pytest.mark.parametrize("best", [{10}, {10, 30}, {10, 20, 30}, {30}, set()], ids=str)
def test_of_three_saves_during_one_write_the_middle_one_is_never_written(trial: Any, best: set[int]) -> None:
    run = trial()
    run.hold(10)
    for step in range(1, 31):
        run.step(step, improved=step in best)
        assert run.saved == []
        assert run.waits() == (20 if 20 <= step < 30 else None)
    assert run.keeper._aside.steps() == [10, 30], "the last save was not given to the thread at once"
    run.go(10)
    run.end()
    assert run.saved == [10, 30]
    assert run.on_disk() == [30]
    assert not run.begun[20].is_set()


def test_the_best_one_that_waits_is_published_before_the_last_and_only_it_is_waited_for(trial: Any) -> None:
    run = trial()
    run.hold(10)
    run.hold(30)
    for step in (10, 20, 30):
        run.step(step, improved=step == 20)
    assert run.keeper._aside.steps() == [10, 20, 30]
    run.go_soon(10)
    with run.keeper.best_weights() as best:
        assert weight_in(best) == 20
        assert run.saved == [10, 20]
    run.go(30)
    run.end()
    assert run.saved == [10, 20, 30]
    assert run.on_disk() == [30]


def test_a_best_one_that_waits_is_never_replaced_by_worse_ones_in_the_middle_of_a_run(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.hold(20)
    run.step(10)
    run.step(20, improved=True)
    run.go_soon(10)
    run.step(30)  # waits for 10, or three copies would lie on the device
    assert (run.saved, run.keeper._aside.steps(), run.waits()) == ([10], [20], 30)
    run.step(40)
    assert (run.saved, run.waits()) == ([10], 40)
    run.go(20)
    run.clock += 1
    run.step(41)
    assert (run.saved, run.waits(), run.keeper._aside.steps()) == ([10, 20], None, [40])
    run.step(60)
    run.end()
    assert run.saved == [10, 20, 40, 60]
    assert run.keeper.state.progress.step == 20


def test_with_three_kept_each_save_is_published(trial: Any) -> None:
    run = trial(keep=3)
    for step in (10, 20):
        run.hold(step)
    run.step(10)
    run.go_soon(10)
    run.step(20, improved=True)
    assert (run.saved, run.waits()) == ([10], None)
    run.go_soon(20)
    run.step(30)
    run.end()
    assert run.saved == [10, 20, 30] == run.on_disk()


def test_without_room_for_a_further_copy_the_waiting_one_goes_first_and_the_run_waits(trial: Any) -> None:
    run = trial(steps=40)
    run.hold(10)
    for step in (10, 20):
        run.step(step)
    run.room = False
    run.go_soon(10)
    run.step(30)
    assert (run.saved, run.waits()) == ([10, 20], None)
    run.step(40)
    run.end()
    assert run.saved == [10, 20, 30, 40]


@pytest.mark.parametrize("at", [25, 30])
def test_a_signal_while_one_waits_saves_the_step_of_the_signal(trial: Any, at: int) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.step(10, improved=True)
    run.step(20)
    run.keeper.stop.signal = int(signal.SIGTERM)
    run.go_soon(10)
    with pytest.raises(StoppedBySignal, match=f"after step {at}; everything is saved"):
        run.step(at)
    assert run.saved == [10, 20, at]
    assert run.on_disk() == [at]
    assert weight_in(run.keeper.run.checkpoint(at)) == at
    assert weight_in(run.keeper.run.best) == 10


def test_after_a_write_that_failed_nothing_behind_it_is_published(trial: Any) -> None:
    run = trial()
    run.hold(10)
    run.broken = {10}
    run.step(10)
    run.step(20, improved=True)
    run.go(10)
    with pytest.raises(TunesmithError, match=r"checkpoint-0*10"):
        run.step(21)
    run.keeper.end("ResourceError")
    assert (run.saved, run.on_disk(), run.begun[20].is_set()) == ([], [], False)


@pytest.mark.parametrize("best", [20, 30])
def test_after_a_write_that_failed_the_chain_behind_it_is_not_published(trial: Any, best: int) -> None:
    run = trial()
    run.hold(10)
    run.broken = {10}
    for step in (10, 20, 30):
        run.step(step, improved=step == best)
    run.go(10)
    with pytest.raises(TunesmithError, match=r"checkpoint-0*10"):
        run.end()
    assert (run.saved, run.on_disk()) == ([], [])
    assert not run.begun[20].is_set()
    assert not run.begun[30].is_set()


def test_the_disk_rests_as_long_as_a_write_took_and_then_the_waiting_one_is_written(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.step(10)
    run.clock += 2.0
    run.go(10)
    run.clock += 1.0
    run.step(20)
    assert (run.saved, run.waits()) == ([10], 20)
    run.clock += 0.9
    run.step(21)
    assert run.waits() == 20
    run.clock += 0.2
    run.step(22)
    assert (run.waits(), run.keeper._aside.steps()) == (None, [20])
    run.keeper._take_save(wait=True)
    assert run.saved == [10, 20]
    run.step(30)
    assert (run.waits(), run.keeper._aside.steps()) == (None, [30]), "nothing was being written: it starts at once"


def test_a_save_that_is_due_when_the_disk_has_rested_is_written_instead_of_the_waiting_one(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.step(10)
    run.clock += 2.0
    run.step(20)
    run.go(10)
    run.clock += 3.0
    run.step(30)
    run.keeper._take_save(wait=True)
    assert run.saved == [10, 30]


def test_when_patience_is_exhausted_nothing_is_put_off(trial: Any) -> None:
    run = trial(steps=60, patience=2)
    run.hold(10)
    run.step(10, improved=True)
    run.step(20)
    run.step(30)
    assert run.keeper._aside.steps() == [10, 30]
    run.go(10)
    run.end()
    assert run.saved == [10, 30]


def test_a_run_that_is_ended_from_outside_writes_the_waiting_one_while_it_is_scored(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.step(10, improved=True)
    run.step(20, improved=True)
    with run.keeper.best_weights() as best:
        assert best is None
        assert run.keeper._aside.steps() == [10, 20]
    run.go(10)
    run.end()
    assert run.saved == [10, 20]


def test_weights_that_are_not_finite_do_not_cost_the_one_that_waits(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.step(10)
    run.step(20)
    with torch.no_grad():
        run.keeper.state.model.classifier.weight[0, 0] = float("inf")
    with pytest.raises(NumericsError, match="not saved"):
        run.keeper.save(30, wait=False)
    run.go_soon(10)
    run.keeper.end("NumericsError")
    assert run.saved == [10, 20]
    assert run.on_disk() == [20]


def test_the_copy_on_the_device_is_given_back_before_it_is_written(trial: Any) -> None:
    run = trial(steps=60)
    run.hold(10)
    run.hold(20)
    run.step(10)
    run.step(20)
    held = weakref.ref(next(iter(run.keeper._waiting.snapshot.files[WEIGHTS].values())))
    run.go(10)
    run.step(21)
    run.clock += 1
    run.step(22)
    assert run.begun[20].wait(patient(20))
    assert held() is None
    run.go(20)


def test_a_signal_that_raises_during_a_wait_does_not_lose_the_job() -> None:
    gate, aside = threading.Event(), Aside()
    aside.start(lambda: gate.wait(patient(20)), 7)

    def arrived(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, arrived)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            aside.take(wait=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gate.set()
    found = aside.take(wait=True)
    assert found is not None
    assert found[0] == 7


def test_jobs_run_one_behind_the_other_and_none_behind_one_that_failed() -> None:
    aside, seen = Aside(), list[int]()

    def job(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0)
        seen.append(number)
        if number == 2:
            raise ValueError(number)

    for number in range(5):
        aside.start(lambda number=number: job(number), number)  # type: ignore[misc]
    assert [aside.take(wait=True)[0] for _ in range(2)] == [0, 1]  # type: ignore[index]
    with pytest.raises(ValueError, match="2"):
        aside.take(wait=True)
    assert aside.take(wait=True) is None
    assert seen == [0, 1, 2]


def test_a_copy_that_stays_has_its_own_of_what_an_optimizer_keeps_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    keeper, _ = make_keeper(tmp_path)
    state = keeper.state
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    snapshot = capture(state, keeper.identity, {}, stays=True)
    assert snapshot is not None
    before = {name: tensor.clone() for name, tensor in snapshot.files[OPTIMIZER].items()}
    state.optimizer.step()
    assert before
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.files[OPTIMIZER].items())
