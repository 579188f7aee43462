"""The engine with every exact strategy has the losses and weights of the plain engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from conftest import tiny_bert, token_lists
from sampling import crossed
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import Task
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.checkpoint import contiguous, whole_weights
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

OFF = {"pack_rows": "off", "first_token_only": "off", "restrict_vocabulary": "off"}


def train(
    wishes: dict[str, Any], *, steps: int = 100, layerwise: float = 1.0
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    rows = TokenRows.from_lists(token_lists(70))
    model = tiny_bert()
    speedups = apply_speedups(model, rows, Padding(), device=torch.device("cpu"), **wishes)
    batches = Batches(rows, speedups.train_collate, 4, seed=5, accumulation=2, sampling="group_by_length")
    count, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=steps, num_epochs=1)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.1, layerwise_lr_decay=layerwise)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True), speedups=speedups)
    plan = Plan(count, ends, Schedule("linear", 1e-3, 5, count), seed=5)
    losses = [e.loss for e in train_events(state, batches, plan) if isinstance(e, StepDone) and e.loss is not None]
    with speedups.whole():
        evaluated = predict_rows(model, rows, speedups.collate, state.runtime, max_rows=16, objective=state.objective)
    return losses, contiguous(whole_weights(state)), evaluated


@functools.cache
def train_plainly(layerwise: float) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train without speedups, for comparison."""
    return train(OFF, layerwise=layerwise)


@pytest.mark.parametrize(("on", "layerwise"), crossed([*OFF, "all"], [1.0, 0.8]))
def test_each_strategy_trains_like_the_plain_step(on: str, layerwise: float) -> None:
    plain_losses, plain, plain_eval = train_plainly(layerwise)
    wishes = {} if on == "all" else {**OFF, on: "on"}
    if on == "first_token_only":  # needs packed batches
        wishes["pack_rows"] = "on"
    losses, weights, evaluated = train(wishes, layerwise=layerwise)
    assert len(losses) == 100
    assert max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)) < 1e-5
    assert plain.keys() == weights.keys()
    for name in plain:
        assert torch.allclose(weights[name], plain[name], atol=1e-4, rtol=0), name
    assert abs(evaluated.loss - plain_eval.loss) < 1e-5
    assert evaluated.logits.shape == (70, 2)
