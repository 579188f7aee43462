"""The contrastive start, for few rows a label: before the first step of a run the encoder learns which rows have the same
label, from all pairs of a batch, and the last layer starts from a linear model of what it learned.

The steps are the engine's, with another loss; a checkpoint has what they left, so that a resumed run does not take them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tunesmith.encoder.pooling import last_linear
from tunesmith.engine.evaluate import Objective
from tunesmith.engine.loop import train_events
from tunesmith.engine.optim import make_optimizer
from tunesmith.engine.plan import Plan, Schedule, epoch_ends_for
from tunesmith.engine.state import TrainState
from tunesmith.events import StepDone
from tunesmith.fast.strategies import Wish, choose_strategies
from tunesmith.labels import LabelMap
from tunesmith.ranks.runtime import Runtime
from tunesmith.recipes.linear_fit import fit_linear
from tunesmith.tokens.batches import Batch, Batches, Padding, evaluation_batches
from tunesmith.tokens.token_rows import TokenRows

STEPS, ROWS_IN_A_BATCH, TEMPERATURE = 200, 32, 0.1


@dataclass(frozen=True)
class ContrastiveLoss:
    """Cross entropy of picking rows with the label of a row among all others of the batch, by the cosine of what the last
    layer reads (supervised contrastive learning, Khosla and others 2020)."""

    temperature: float = TEMPERATURE

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed loss; a row that has no partner adds nothing."""
        vectors = functional.normalize(read_by_head(model, batch.inputs).float(), dim=1)
        assert batch.labels is not None
        alone = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
        same = (batch.labels[:, None] == batch.labels) & ~alone & (batch.labels >= 0)
        chances = (vectors @ vectors.T / self.temperature).masked_fill(alone, -torch.inf).log_softmax(1)
        return -(chances.masked_fill(~same, 0.0).sum(1) / same.sum(1).clamp_min(1)).sum(), None

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """Rows that have a partner."""
        assert labels is not None
        _, counts = np.unique(labels[labels >= 0], return_counts=True)
        return float(counts[counts > 1].sum()) or 1.0


def read_by_head(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """What the last layer reads of each row."""
    kept: list[torch.Tensor] = []
    hook = last_linear(model).register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    try:
        model(**inputs)
    finally:
        hook.remove()
    return kept[0]


def start_contrastively(
    model: nn.Module,
    rows: TokenRows,
    padding: Padding,
    labels: LabelMap,
    runtime: Runtime,
    *,
    learning_rate: float,
    fit_head: bool,
    seed: int,
    on_step: Callable[[int, int], None],
    most: int | None = None,
) -> None:
    """Trains the encoder and fits the last layer, in place. The model is on its device and has its pooling."""
    assert rows.labels is not None
    rows = rows.select(np.flatnonzero(rows.labels >= 0))
    take_steps(
        model,
        rows,
        padding,
        runtime,
        ContrastiveLoss(),
        steps=STEPS,
        learning_rate=learning_rate,
        seed=seed,
        on_step=on_step,
        most=most,
    )
    if fit_head:
        refit_head(model, rows, padding, labels, runtime)


def take_steps(
    model: nn.Module,
    rows: TokenRows,
    padding: Padding,
    runtime: Runtime,
    objective: Objective,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, int], None],
    most: int | None,
    fast: bool = False,
) -> None:
    """Steps of the engine in front of the first one of a run, in place, `most` of them to time them; `fast`: with fused layers
    and captured steps."""
    wish: Wish = "auto" if fast else "off"
    how = choose_strategies(
        model,
        rows,
        padding,
        device=runtime.device,
        precision=runtime.precision,
        fused_layers=wish,
        cuda_graphs=wish,
    )
    on_gpu = runtime.device.type == "cuda"
    order: dict[str, Any] = {"ahead": 2, "pinned": True} if on_gpu and fast else {}
    order["sampling"] = how.best_order(runtime.device) if fast else "random"
    batches = Batches(rows, how.train_collate, ROWS_IN_A_BATCH, seed=seed, **order)
    count, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=steps, num_epochs=0)
    plan = Plan(count, ends, Schedule("linear", learning_rate, count // 10, count), seed=seed)
    captured = how.graphs is not None
    optimizer = make_optimizer(
        model, learning_rate=learning_rate, layers=how.fused, only_writer=True, captured=captured
    )
    state = TrainState(model, optimizer, objective, runtime, graphs=how.graphs, strategies=how)
    for event in train_events(state, batches, plan):
        if isinstance(event, StepDone):
            on_step(event.step, count)
            if event.step == most:
                break
    how.disable()


def refit_head(model: nn.Module, rows: TokenRows, padding: Padding, labels: LabelMap, runtime: Runtime) -> None:
    """The last layer becomes a linear model of what it reads."""
    layer = last_linear(model)
    found = torch.empty(len(rows), layer.in_features, device=runtime.device)
    model.eval()
    with torch.no_grad(), runtime.autocast():
        for batch in evaluation_batches(rows, padding, max_rows=64):
            vectors = read_by_head(model, runtime.move(batch).inputs).float()
            found[torch.from_numpy(batch.rows).to(found.device)] = vectors
    assert rows.labels is not None
    fit = fit_linear(found, torch.from_numpy(rows.labels).to(found.device), labels.task, len(labels))
    with torch.no_grad():
        layer.weight.copy_(fit.weights)
        layer.bias.copy_(fit.bias)
    model.train()
