"""What a model is given before the first step of a run: steps of the engine with another loss, and a last layer fitted to what
it reads. A checkpoint has what they left, so that a resumed run does not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batches, Padding, evaluation_batches
from tunesmith.data.tokens import TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap, Task
from tunesmith.models.pooling import last_linear
from tunesmith.pipeline.linear_fit import fit_linear, fit_logistic
from tunesmith.speedups.apply import Wish, choose_strategies
from tunesmith.training.distributed import Runtime
from tunesmith.training.evaluation import Objective
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

ROWS_IN_A_BATCH = 32


def read_by_head(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """What the last layer reads of each row."""
    kept: list[torch.Tensor] = []
    hook = last_linear(model).register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    try:
        model(**inputs)
    finally:
        hook.remove()
    return kept[0]


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


def what_head_reads(model: nn.Module, rows: TokenRows, padding: Padding, runtime: Runtime) -> torch.Tensor:
    """(rows, width): what the last layer reads. The model is in training mode after it."""
    found = torch.empty(len(rows), last_linear(model).in_features, device=runtime.device)
    model.eval()
    with torch.no_grad(), runtime.autocast():
        for batch in evaluation_batches(rows, padding, max_rows=64):
            vectors = read_by_head(model, runtime.move(batch).inputs).float()
            found[torch.from_numpy(batch.rows).to(found.device)] = vectors
    model.train()
    return found


def fit_head(read: torch.Tensor, gold: npt.NDArray[Any], labels: LabelMap) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Weights and bias of a linear model of what the last layer reads."""
    known = torch.from_numpy(gold).to(read.device)
    if labels.task in (Task.BINARY, Task.MULTICLASS):
        weights, bias = fit_logistic(read, known, len(labels))
    else:
        fit = fit_linear(read, known, labels.task, len(labels))
        weights, bias = fit.weights, fit.bias
    return weights.float().cpu().numpy(), bias.float().cpu().numpy()
