"""A restricted vocabulary trains the same weights as the full one, or is switched off with a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import Note
from tunesmith.labels import Task
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.schedule import Plan, Schedule
from tunesmith.training.state import TrainState

STEPS, RATE = 8, 1e-2


class Shrinking(Optimizer):
    """A custom optimizer: every value moves toward the mean of its matrix."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p - p.mean() + p.grad))


Make = Callable[[Any], Optimizer]


EXACT: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=RATE, weight_decay=0.3),
    "Adam": lambda p: Adam(p, lr=RATE),
    "Adam, decoupled": lambda p: Adam(p, lr=RATE, weight_decay=0.3, decoupled_weight_decay=True),
    "SGD with momentum": lambda p: SGD(p, lr=RATE, momentum=0.9, nesterov=True),
    "SGD with decay": lambda p: SGD(p, lr=RATE, weight_decay=0.3),
    "RMSprop": lambda p: RMSprop(p, lr=RATE, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=RATE),
}


INEXACT: dict[str, Make] = {
    "Adam with decay": lambda p: Adam(p, lr=RATE, weight_decay=0.3),
    "SGD with momentum and decay": lambda p: SGD(p, lr=RATE, momentum=0.9, weight_decay=0.3),
    "RMSprop with decay": lambda p: RMSprop(p, lr=RATE, weight_decay=0.3),
    "Adagrad with decay": lambda p: Adagrad(p, lr=RATE, weight_decay=0.3),
    "NAdam": lambda p: NAdam(p, lr=RATE),
    "its own": lambda p: Shrinking(p, lr=RATE),
}


def run(make: Make, *, change_at: int | None = None, **wishes: Any) -> tuple[dict[str, torch.Tensor], list[str], Any]:
    """Train and return weights, notes and speedups."""
    model = tiny_bert()
    rows = TokenRows.from_lists(token_lists(32))
    chosen = apply_speedups(model, rows, Padding(), device=torch.device("cpu"), **wishes)
    optimizer = make(model.parameters())
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True), speedups=chosen)
    plan = Plan(STEPS, (STEPS,), Schedule("linear", RATE, 2, STEPS), seed=1)
    notes = []
    for event in train_events(state, Batches(rows, chosen.train_collate, 4, seed=1), plan):
        if isinstance(event, Note):
            notes.append(event.text)
        if change_at is not None and state.step == change_at:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.3
    with chosen.whole():
        found = {n: t.clone() for n, t in model.state_dict().items()}
    chosen.close()
    assert all(torch.equal(found[n], t) for n, t in model.state_dict().items())
    return found, notes, chosen


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-4, atol=2e-5), name


@pytest.mark.parametrize("make", EXACT.values(), ids=list(EXACT))
def test_elementwise_optimizer_keeps_restricted_vocabulary(make: Make) -> None:
    ours, notes, chosen = run(make, restrict_vocabulary="on")
    assert notes == []
    assert not chosen.dropped
    same(run(make, restrict_vocabulary="off")[0], ours)


@pytest.mark.parametrize("make", INEXACT.values(), ids=list(INEXACT))
def test_other_optimizer_trains_full_vocabulary(make: Make) -> None:
    ours, notes, chosen = run(make, restrict_vocabulary="on")
    assert [note.split(": ")[0] for note in notes] == ["restrict_vocabulary is off"]
    assert chosen.dropped == {"restrict_vocabulary"}
    same(run(make, restrict_vocabulary="off")[0], ours)


def test_weight_decay_set_midway_keeps_the_moments() -> None:
    ours, notes, _ = run(EXACT["Adam"], change_at=4, restrict_vocabulary="on")
    assert len(notes) == 1
    same(run(EXACT["Adam"], change_at=4, restrict_vocabulary="off")[0], ours)
