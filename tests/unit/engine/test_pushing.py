"""Adversarial steps: the word embedding is moved where the loss grows, for one reading, and is as before to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.engine.evaluate import TaskLoss
from tunesmith.engine.optim import make_optimizer
from tunesmith.engine.pushing import pushed
from tunesmith.engine.state import TrainState
from tunesmith.engine.step import train_step
from tunesmith.labels import Task
from tunesmith.ranks.runtime import make_runtime
from tunesmith.tokens.batches import Batches, Padding
from tunesmith.tokens.token_rows import TokenRows


def make_state(push: float) -> TrainState:
    model = tiny_bert(dropout=0.0)
    optimizer = make_optimizer(model, learning_rate=1e-2)
    return TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True), push=push)


def batches(size: int, accumulation: int = 1) -> Batches:
    rows = TokenRows.from_lists(token_lists(24))
    return Batches(rows, Padding(), size, seed=3, accumulation=accumulation, sampling="random")


def steps(state: TrainState, size: int, accumulation: int = 1) -> list[float]:
    found = batches(size, accumulation).windows(0)
    return [float(train_step(state, w, learning_rate=1e-2, max_grad_norm=1.0, seed=0).loss) for w in found]


def test_the_rows_of_the_batch_move_by_a_share_of_their_norm_to_where_the_loss_grows() -> None:
    model: Any = tiny_bert(dropout=0.0)
    window = next(iter(batches(8).windows(0)))
    objective, table = TaskLoss(Task.BINARY, 2), model.get_input_embeddings().weight
    loss, _ = objective.sum(model, window.micro_batches[0])
    loss.backward()
    before, used = table.detach().clone(), table.grad.abs().sum(1) > 0
    with pushed(model, 0.05), torch.no_grad():
        moved = table.detach() - before
        assert float(objective.sum(model, window.micro_batches[0])[0]) > float(loss)
    assert torch.equal(table, before)
    assert 0 < int(used.sum()) < len(table)
    assert not moved[~used].any()
    assert float(moved.norm()) == pytest.approx(0.05 * float(before[used].norm()), rel=1e-4)


def test_an_adversarial_step_does_not_depend_on_how_it_is_cut_into_micro_batches() -> None:
    assert steps(make_state(0.1), 8) == pytest.approx(steps(make_state(0.1), 2, 4), abs=1e-5)


def test_adversarial_steps_train_another_model_and_none_are_taken_with_a_frozen_embedding() -> None:
    plain, adversarial = make_state(0.0), make_state(0.1)
    assert steps(adversarial, 8)[0] > steps(plain, 8)[0]
    frozen = [make_state(0.0), make_state(0.1)]
    for state in frozen:
        state.model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    assert steps(frozen[0], 8) == pytest.approx(steps(frozen[1], 8), abs=1e-6)
