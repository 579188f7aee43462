"""Speedups verify themselves before the first step and when the model changes, and leave nothing behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import Note, SafePoint, StepDone
from tunesmith.labels import Task
from tunesmith.speedups import verify
from tunesmith.speedups.apply import Speedups, apply_speedups
from tunesmith.speedups.cuda_graphs import Fingerprint
from tunesmith.training.checkpoint import Identity, load_checkpoint, save_checkpoint
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule
from tunesmith.training.state import TrainState

STEPS = 6


class Counted(nn.Module):
    """A custom model: a norm with running means, a call counter, and random numbers from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = tiny_bert(dropout=0.1), nn.BatchNorm1d(2)
        self.calls, self.seen = 0, list[int]()

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        self.seen.append(len(inputs["input_ids"]))
        drawn = torch.rand(()) + float(np.random.rand()) + random.random()
        logits = self.norm(self.inner(**inputs).logits) * (1 + 0.01 * drawn) / self.calls
        return SequenceClassifierOutput(logits=logits)


def begin(model: Any, *, prove: bool = True, **wishes: Any) -> tuple[TrainState, Batches, Plan, Speedups]:
    rows = TokenRows.from_lists(token_lists(48))
    chosen = apply_speedups(model, rows, Padding(), device=torch.device("cpu"), **wishes)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.1)
    loss, runtime = TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True)
    state = TrainState(model, optimizer, loss, runtime, speedups=chosen)
    if not prove:
        state.verified = state.fingerprint.of_model()
    plan = Plan(STEPS, (STEPS,), Schedule("linear", 1e-3, 0, STEPS), seed=1)
    return state, Batches(rows, chosen.train_collate, 8, seed=1), plan, chosen


def losses_of(events: Any) -> list[float | None]:
    return [e.loss for e in events if isinstance(e, StepDone)]


@pytest.mark.parametrize("make", [lambda: tiny_bert(dropout=0.1), Counted], ids=["known", "own"])
def test_run_is_bit_identical_with_and_without_verification(make: Any) -> None:
    found = []
    for prove in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        state, batches, plan, chosen = begin(make(), prove=prove)
        events = list(train_events(state, batches, plan))
        assert not any(isinstance(e, Note) for e in events)
        chosen.close()
        found.append((losses_of(events), state.model.state_dict(), [torch.rand(3), np.random.rand(), random.random()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][n], found[1][1][n]) for n in found[0][1])
    assert torch.equal(found[0][2][0], found[1][2][0])
    assert found[0][2][1:] == found[1][2][1:]


def test_verification_leaves_model_unchanged() -> None:
    state, batches, _, chosen = begin(Counted())
    model, heard = state.model, list[int]()
    weight = model.inner.classifier.weight
    weight.register_hook(lambda g: heard.append(1))
    weight.grad = torch.full_like(weight, 7.0)
    model.inner.bert.eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    verify.ready(state, next(batches.windows(0)))
    assert state.verified is not None
    assert (heard, model.calls, model.seen) == ([], 0, [])
    assert float(weight.grad.mean()) == 7.0
    assert len(weight._backward_hooks) == 1
    assert not model.inner.bert.training
    assert model.training
    assert model.inner.bert.embeddings.dropout.p == 0.1
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert list(chosen.parts) == ["restrict_vocabulary"]


@pytest.mark.parametrize("change", ["hook", "pooler", "attention", "frozen"])
def test_model_that_changes_midway_is_verified_again(change: str) -> None:
    def do(model: Any) -> None:
        if change == "hook":
            model.bert.encoder.layer[0].register_forward_hook(lambda m, a, o: o + o.mean(1, keepdim=True))
        elif change == "pooler":
            model.bert.pooler = Mean()
        elif change == "attention":
            model.config._attn_implementation = "sdpa"
        else:
            model.bert.encoder.layer[0].requires_grad_(False)

    def run(**wishes: Any) -> tuple[list[float | None], list[str]]:
        state, batches, plan, _ = begin(tiny_bert(), **wishes)
        events = []
        for event in train_events(state, batches, plan):
            events.append(event)
            if isinstance(event, StepDone) and event.step == 3:
                do(state.model)
        return losses_of(events), [e.text for e in events if isinstance(e, Note)]

    off = {"pack_rows": "off", "first_token_only": "off", "restrict_vocabulary": "off"}
    ours, notes = run()
    assert ours == pytest.approx(run(**off)[0], abs=2e-5)
    assert bool(notes) == (change in ("hook", "pooler")), notes


class Mean(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1)


def test_error_of_the_user_model_ends_the_run() -> None:
    class Broken(Counted):
        def forward(self, **inputs: Any) -> Any:
            raise ValueError("my own mistake")

    state, batches, plan, _ = begin(Broken())
    with pytest.raises(ValueError, match="my own mistake"):
        list(train_events(state, batches, plan))


def test_model_that_needs_full_batches_gets_one() -> None:
    class Whole(Counted):
        def forward(self, **inputs: Any) -> Any:
            assert len(inputs["input_ids"]) == 8
            return super().forward(**inputs)

    state, batches, plan, chosen = begin(Whole())
    assert not [e for e in train_events(state, batches, plan) if isinstance(e, Note)]
    assert "restrict_vocabulary" in chosen.parts


def test_dropped_vocabulary_stays_dropped_after_a_resume(tmp_path: Path) -> None:
    def begun() -> tuple[TrainState, Batches, Plan]:
        state, batches, plan, _ = begin(tiny_bert())
        state.optimizer = torch.optim.Adam(state.model.parameters(), weight_decay=0.1)
        state.fingerprint = Fingerprint(state.model, state.optimizer)
        return state, batches, plan

    identity = Identity("run", "rows", {}, {}, {})
    state, batches, plan = begun()
    losses = []
    for event in train_events(state, batches, plan):
        losses += [event.loss] if isinstance(event, StepDone) else []
        if isinstance(event, SafePoint) and event.step == 3:
            save_checkpoint(tmp_path / "checkpoint-3", state, identity)
    assert state.vocabulary is None
    state, batches, plan = begun()
    load_checkpoint(tmp_path / "checkpoint-3", state)
    assert losses_of(train_events(state, batches, plan)) == losses[3:]
