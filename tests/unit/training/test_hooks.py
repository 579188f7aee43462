"""Hooks inside a step: called in order, and without any effect on the numbers."""

from __future__ import annotations

from typing import Any

import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.labels import Task
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule
from tunesmith.training.state import StepHooks, TrainState
from tunesmith.training.step import micro_step


def run(hooks: StepHooks | None = None, *, accumulation: int = 2) -> TrainState:
    batches = Batches(TokenRows.from_lists(token_lists(16)), Padding(), 4, seed=1, accumulation=accumulation)
    model = tiny_bert()
    optimizer = make_optimizer(model, learning_rate=1e-3)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True))
    if hooks is not None:
        state.hooks = hooks
    for _ in train_events(state, batches, Plan(2, (2,), Schedule("linear", 1e-3, 0, 2), seed=1, max_grad_norm=0.01)):
        pass
    return state


def weights(state: TrainState) -> list[torch.Tensor]:
    return [p.detach().clone() for p in state.model.parameters()]


def test_hooks_are_called_in_the_order_of_a_step_and_change_nothing() -> None:
    heard: list[str] = []
    hooks = StepHooks(
        begin=lambda window: heard.append(f"begin {len(window.rows)}"),
        substep_end=lambda: heard.append("substep"),
        before_update=lambda: heard.append("before"),
        after_update=lambda numbers: heard.append("after"),
    )
    watched, plain = run(hooks), run()
    assert heard == ["begin 8", "substep", "before", "after"] * 2
    for a, b in zip(weights(watched), weights(plain), strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_gradients_are_clipped_before_the_hook_sees_them() -> None:
    hooks = StepHooks()
    norms: list[float] = []
    batches = Batches(TokenRows.from_lists(token_lists(16)), Padding(), 8, seed=1)
    model = tiny_bert()
    state = TrainState(
        model, make_optimizer(model, learning_rate=1e-3), TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True)
    )
    hooks.before_update = lambda: norms.append(
        float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    )
    state.hooks = hooks
    list(train_events(state, batches, Plan(2, (2,), Schedule("linear", 1e-3, 0, 2), seed=1, max_grad_norm=0.01)))
    assert len(norms) == 2
    assert all(abs(norm - 0.01) < 1e-5 for norm in norms)


def test_a_micro_step_of_the_callers_stands_in_for_ours() -> None:
    calls: list[float] = []
    holder: dict[str, TrainState] = {}

    def mine(batch: Any, factor: float) -> torch.Tensor:
        calls.append(factor)
        return micro_step(holder["state"], batch, factor)

    batches = Batches(TokenRows.from_lists(token_lists(16)), Padding(), 4, seed=1, accumulation=2)
    model = tiny_bert()
    state = TrainState(
        model, make_optimizer(model, learning_rate=1e-3), TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True)
    )
    holder["state"] = state
    state.hooks = StepHooks(micro_step=mine)
    plan = Plan(2, (2,), Schedule("linear", 1e-3, 0, 2), seed=1, max_grad_norm=0.01)
    assert len(list(train_events(state, batches, plan))) > 0
    assert calls == [1 / 8] * 4
    for a, b in zip(weights(state), weights(run()), strict=True):
        assert torch.equal(a, b)


def test_a_scheduler_of_the_callers_keeps_its_rates() -> None:
    state = run(StepHooks(sets_rate=True))
    assert {g["lr"] for g in state.optimizer.param_groups} == {1e-3}
    assert {g["lr"] for g in run().optimizer.param_groups} == {5e-4}
