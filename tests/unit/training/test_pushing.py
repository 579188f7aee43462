"""Adversarial steps: the word embedding is moved where the loss grows, for one reading, and is as before to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.labels import Task
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.state import TrainState
from tunesmith.training.step import TwoReadings, pushed, train_step


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
    losses = [steps(state, 8) for state in (plain, adversarial)]
    assert losses[0][0] == losses[1][0], "the loss that is reported is that of the first reading"
    assert losses[0][-1] != losses[1][-1]
    frozen = [make_state(0.0), make_state(0.1)]
    for state in frozen:
        state.model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    assert steps(frozen[0], 8) == pytest.approx(steps(frozen[1], 8), abs=1e-6)


@pytest.mark.parametrize(("task", "labels"), [(Task.MULTICLASS, 3), (Task.MULTILABEL, 3), (Task.REGRESSION, 1)])
def test_outputs_that_do_not_move_add_nothing_and_others_their_divergence(task: Task, labels: int) -> None:
    torch.manual_seed(0)
    objective, before, after = TaskLoss(task, labels), torch.randn(4, labels), torch.randn(4, labels)
    assert float(objective.divergence(before, before)) == pytest.approx(0, abs=1e-6)
    found = float(objective.divergence(after, before))
    if task is Task.REGRESSION:
        assert found == pytest.approx(float((after - before).square().sum()), rel=1e-5)
        return
    p, q = (t.softmax(1) if task is Task.MULTICLASS else t.sigmoid() for t in (before, after))
    wanted = p * (p / q).log()
    if task is Task.MULTILABEL:
        wanted = wanted + (1 - p) * ((1 - p) / (1 - q)).log()
    assert found == pytest.approx(float(wanted.sum()), rel=1e-4)


def test_the_second_reading_asks_for_the_outputs_of_the_first() -> None:
    state = make_state(0.0)
    window = next(iter(batches(8).windows(0)))
    both = TwoReadings(state.objective)
    loss, logits = both.sum(state.model, window.micro_batches[0])
    assert loss.item() == state.objective.sum(state.model, window.micro_batches[0])[0].item()
    loss.backward()
    both.again = True
    with pushed(state.model, 0.1):
        apart, moved = both.sum(state.model, window.micro_batches[0])
    assert logits is not None
    assert moved is not None
    assert apart.item() == pytest.approx(TaskLoss(Task.BINARY, 2).divergence(moved, logits).item())
    assert apart.item() > 0
    assert not both.outputs
