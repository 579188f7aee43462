"""The engine on a GPU for tests: BERT-base's width, random weights, token ids of scratch/tokens (bench/common.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from common import engine_rows
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState, seed_everything
from tunesmith.training.step import micro_step

OFF = dict.fromkeys(("pack_rows", "first_token_only", "restrict_vocabulary", "fused_layers", "cuda_graphs"), "off")
__all__ = [
    "OFF",
    "apart",
    "difference",
    "engine_rows",
    "gradient",
    "gradients_of_first",
    "make_state",
    "train",
    "weights",
]


def apart(one: Any, other: Any) -> float:
    """Return the largest difference between two lists of numbers."""
    return float(np.abs(np.subtract(one, other)).max())


def make_state(
    rows: TokenRows,
    layers: int,
    precision: Any,
    dropout: float,
    accumulation: int = 1,
    weights: Any = None,
    batch: int = 8,
    multiple: int | None = None,
    **wishes: Any,
) -> tuple[TrainState, Batches, Any]:
    """Return a new state with seeded weights, its batches and speedups."""
    from transformers import BertConfig, BertForSequenceClassification

    seed_everything(0)
    runtime = make_runtime(precision=precision)
    labels = LabelMap.for_classes(["0", "1"])
    config = BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    model = BertForSequenceClassification(config).to(runtime.device)
    chosen = apply_speedups(
        model, rows, Padding(multiple_of=multiple), device=runtime.device, precision=precision, **wishes
    )
    batches = Batches(
        rows,
        chosen.train_collate,
        batch,
        seed=1,
        accumulation=accumulation,
        sampling="group_by_length",
        ahead=2,
        pinned=True,
    )
    optimizer = make_optimizer(model, learning_rate=5e-5, weight_decay=0.01)
    objective = TaskLoss(labels.task, 2, weights)
    return TrainState(model, optimizer, objective, runtime, speedups=chosen), batches, chosen


def train(state: TrainState, batches: Batches, steps: int, total: int = 400) -> list[float]:
    """Return the losses of the next steps of a run with `total` steps."""
    _, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=total, num_epochs=1)
    plan = Plan(total, ends, Schedule("linear", 5e-5, 10, total), seed=3, read_back_every=16)
    losses: list[float] = []
    target = state.step + steps
    for event in train_events(state, batches, plan, wants_read_back=lambda step: step >= target):
        if isinstance(event, StepDone):
            losses.append(float("nan") if event.loss is None else event.loss)
        if state.step >= target and len(losses) >= steps:
            break
    return losses


def weights(state: TrainState, chosen: Any) -> dict[str, torch.Tensor]:
    """Return all weights on the CPU, with the full vocabulary."""
    with chosen.whole():
        return {n: p.detach().cpu().clone() for n, p in state.model.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def gradients_of_first(state: TrainState, batches: Batches) -> dict[str, torch.Tensor]:
    """Return the first batch's gradients by parameter name; a restricted word embedding is expanded to the full vocabulary."""
    window = next(iter(batches.windows(0)))
    state.model.train()
    micro_step(state, state.runtime.move(window.micro_batches[0]), 1 / 8)
    found = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    if state.vocabulary is not None:
        word = next(n for n, p in state.model.named_parameters() if p is state.vocabulary.parameter)
        found[word] = state.vocabulary.expand(found[word]).to(found[word].device)
    return {name: gradient.double() for name, gradient in found.items()}


def gradient(state: TrainState, batches: Batches) -> torch.Tensor:
    """Return the first batch's gradients as one vector, without the word embedding."""
    return torch.cat([g.flatten() for n, g in gradients_of_first(state, batches).items() if "word" not in n])
