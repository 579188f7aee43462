"""fp16: an overflow that a smaller loss scale cures is skipped; a number that no scale cures is an event, soon."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batch, Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.events import NonFinite, StepDone
from tunesmith.labels import Task
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule
from tunesmith.training.state import SMALLEST, LossScale, TrainState


class NanLoss(TaskLoss):
    def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, logits = super().sum(model, batch)
        return loss * float("nan"), logits


class NanGradient(TaskLoss):
    """A finite loss whose gradient is NaN or infinite at any scale."""

    def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, logits = super().sum(model, batch)
        return loss + torch.sqrt(model.get_parameter("classifier.bias").abs() * 0.0).sum(), logits


def run(objective: TaskLoss, *, scale: float = 65536.0, every: int = 1, action: Any = "stop") -> tuple[Any, list[Any]]:
    """(state, events up to the first that is NaN or infinite, or of 40 steps)."""
    model = tiny_bert(dropout=0.0)
    state = TrainState(model, make_optimizer(model, learning_rate=1e-2), objective, make_runtime(use_cpu=True))
    state.loss_scale = LossScale.start(torch.device("cpu"), scale)
    batches = Batches(TokenRows.from_lists(token_lists(160)), Padding(), 4, seed=3)
    plan = Plan(40, (40,), Schedule("linear", 1e-2, 0, 40), seed=0, read_back_every=every, nan_action=action)
    events = []
    for event in train_events(state, batches, plan):
        events.append(event)
        if isinstance(event, NonFinite) and action == "stop":
            break
    return state, events


def told(events: list[Any]) -> list[NonFinite]:
    return [e for e in events if isinstance(e, NonFinite)]


@pytest.mark.parametrize("every", [1, 16])
def test_a_loss_that_is_not_finite_is_an_event_at_once(every: int) -> None:
    fresh = tiny_bert(dropout=0.0).state_dict()
    state, events = run(NanLoss(Task.BINARY, 2), every=every)
    assert [(e.step, e.what) for e in told(events)] == [(1, "loss")]
    assert all(torch.equal(fresh[n], t) for n, t in state.model.state_dict().items())


def test_a_gradient_that_no_scale_cures_is_an_event_after_a_bounded_number_of_halvings() -> None:
    state, events = run(NanGradient(Task.BINARY, 2))
    assert [(e.step, e.what, e.tensor) for e in told(events)] == [(27, "gradient", "classifier.bias")]
    assert float(state.loss_scale.scale) == SMALLEST


def test_a_run_that_skips_such_steps_tells_of_each_and_keeps_a_scale_it_can_train_with() -> None:
    state, events = run(NanLoss(Task.BINARY, 2), action="skip")
    assert [e.step for e in told(events)] == list(range(1, 41))
    assert float(state.loss_scale.scale) == SMALLEST


def test_an_overflow_that_a_smaller_scale_cures_is_skipped_and_training_continues() -> None:
    state, events = run(TaskLoss(Task.BINARY, 2), scale=2.0**80)
    steps = [e for e in events if isinstance(e, StepDone)]
    assert told(events) == []
    assert steps[0].loss is not None
    assert steps[0].grad_norm is None, "the first step must overflow"
    skipped = sum(e.grad_norm is None for e in steps)
    assert 0 < skipped < 25
    assert {int(s["step"]) for s in state.optimizer.state.values()} == {40 - skipped}
