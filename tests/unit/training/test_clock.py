"""The seconds of all steps are the time that training took, however seldom their numbers are read back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import DataError
from tunesmith.events import SafePoint, StepDone
from tunesmith.labels import Task
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Calendar, Plan, Schedule
from tunesmith.training.state import TrainState


def make_state() -> TrainState:
    model = tiny_bert(dropout=0.0)
    optimizer = make_optimizer(model, learning_rate=1e-3)
    return TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True))


@pytest.mark.parametrize("every", [1, 16])
def test_the_seconds_of_steps_add_up_to_the_time_between_the_events_of_a_run(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's own: it moves by 1 with each micro-batch, 100 with an evaluation, 1,000 with a save."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(TaskLoss):
        def sum(self, model: Any, batch: Any) -> Any:
            now[0] += 1.0
            return super().sum(model, batch)

    def evaluate(state: TrainState) -> Any:
        now[0] += 100.0
        return {"validation": ({"loss": 1.0}, 1)}

    state = make_state()
    state.objective = Slow(Task.BINARY, 2)
    batches = Batches(TokenRows.from_lists(token_lists(42)), Padding(), 2, seed=3)
    schedule = Schedule("constant", 1e-3, 0, 42)
    plan = Plan(42, (21, 42), schedule, seed=0, read_back_every=every, evaluate=Calendar("steps", 10))
    seconds = []
    for event in train_events(state, batches, plan, evaluate=evaluate):
        if isinstance(event, StepDone):
            seconds.append(event.seconds)
        elif isinstance(event, SafePoint):
            now[0] += 1000.0
    assert seconds == [1.0] * 42


def test_a_source_that_yields_nothing_is_named_instead_of_asked_for_ever() -> None:
    class Exhausted:
        def __init__(self) -> None:
            self.windows_left = Batches(TokenRows.from_lists(token_lists(8)), Padding(), 4, seed=3).windows(0)

        def windows(self, epoch: int, skip: int = 0) -> Any:
            return self.windows_left

    plan = Plan(9, (2, 4, 6, 8, 10), Schedule("constant", 1e-3, 0, 9), seed=0)
    with pytest.raises(DataError, match=r"Exhausted.*step 2.*9"):
        list(train_events(make_state(), Exhausted(), plan))
