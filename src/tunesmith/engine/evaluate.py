"""Predictions for every row of a split, in input order, over all ranks, with the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.engine.losses import Objective, TaskLoss
from tunesmith.engine.step import split_batch
from tunesmith.errors import ResourceError
from tunesmith.ranks.runtime import Runtime
from tunesmith.ranks.sharding import gathered_weights
from tunesmith.tokens.batches import Batch, Collate, evaluation_batches, pin_batch
from tunesmith.tokens.encoding_processes import prefetched
from tunesmith.tokens.token_rows import TokenRows
from tunesmith.tokens.truncation import mean_by_row

TOKENS_AT_ONCE = {False: 4096, True: 32_768}
"""On a CPU and on a GPU. MiniLM-L6 on one core took 7% more with 512 tokens and with 8,192 (docs/performance.md); a GPU is
bound by launches with few."""


@dataclass(frozen=True)
class Predictions:
    """`logits[i]` belongs to row i. `loss` is None without labels."""

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[Any] | None
    loss: float | None


def predict_rows(
    model: nn.Module,
    rows: TokenRows,
    collate: Collate,
    runtime: Runtime,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    objective: Objective | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Predictions:
    """One prediction per row, in input order. Leaves the model's train or eval mode as it was.

    Without limits, batches hold as many tokens as the device works best with. Rows in windows have the mean of their logits.
    """
    if rows.windows is not None:
        limits = {"max_rows": max_rows, "max_tokens": max_tokens}
        return _predict_windows(model, rows, collate, runtime, objective, on_batch=on_batch, **limits)
    if max_rows is None and max_tokens is None:
        max_tokens = TOKENS_AT_ONCE[runtime.device.type == "cuda"]
    source = evaluation_batches(
        rows, collate, max_rows=max_rows, max_tokens=max_tokens, rank=runtime.rank, world=runtime.world
    )
    if runtime.device.type == "cuda":  # batches are made while the device works, and copied without holding it up
        source = prefetched(source, pin_batch)
    was_training = model.training
    model.eval()
    places: list[npt.NDArray[np.int64]] = []
    outputs: list[torch.Tensor] = []
    loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
    try:
        with gathered_weights(model), torch.inference_mode():
            for batch, logits, loss in _forward_all(model, source, runtime, objective):
                places.append(batch.rows)
                outputs.append(logits)
                if loss is not None:
                    loss_sum += loss
                if on_batch is not None:
                    on_batch(len(batch))
    finally:
        model.train(was_training)
    ordered = _in_input_order(len(rows), places, outputs, runtime)
    weight = objective.weight(rows.labels, len(rows)) if objective is not None and rows.labels is not None else 0.0
    total = float(runtime.sum_over_ranks(loss_sum))
    return Predictions(ordered, rows.labels, total / weight if weight > 0 else None)


def _predict_windows(
    model: nn.Module,
    rows: TokenRows,
    collate: Collate,
    runtime: Runtime,
    objective: Objective | None,
    **options: Any,
) -> Predictions:
    """Each row has the mean of its windows' logits, and the loss of that mean."""
    parts, owners = rows.all_windows()
    logits = mean_by_row(predict_rows(model, parts, collate, runtime, **options).logits, owners)
    labels = rows.labels
    weight = objective.weight(labels, len(rows)) if objective is not None else 0.0
    if labels is None or weight <= 0 or not isinstance(objective, TaskLoss):
        return Predictions(logits, labels, None)
    loss = objective.of_logits(torch.from_numpy(logits), torch.from_numpy(labels))
    return Predictions(logits, labels, float(loss) / weight)


def _forward_all(
    model: nn.Module, source: Iterator[Batch], runtime: Runtime, objective: Objective | None
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor | None]]:
    """Each batch with its logits and summed loss; a batch that does not fit in memory is halved until it does."""
    limit: int | None = None
    for whole in source:
        todo = [whole] if limit is None else split_batch(whole, limit)
        while todo:
            batch = todo.pop(0)
            try:
                yield (batch, *_forward(model, runtime.move(batch), runtime, objective))
            except torch.OutOfMemoryError as error:
                if len(batch) <= 1:
                    raise ResourceError(
                        "out of memory in evaluation with one row", fix="Lower --max_seq_length or use a smaller model."
                    ) from error
                limit = (len(batch) + 1) // 2
                todo = [*split_batch(batch, limit), *todo]


def _forward(
    model: nn.Module, batch: Batch, runtime: Runtime, objective: Objective | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    with runtime.autocast():
        if objective is not None and batch.labels is not None:
            loss, logits = objective.sum(model, batch)
            assert logits is not None
            return logits.float(), loss.double()
        return model(**batch.inputs).logits.float(), None


def _in_input_order(
    num_rows: int, places: list[npt.NDArray[np.int64]], outputs: list[torch.Tensor], runtime: Runtime
) -> npt.NDArray[np.float32]:
    """Logits of all ranks, each at its own row."""
    width = int(outputs[0].shape[-1]) if outputs else 0
    mine = torch.cat(outputs).cpu().numpy() if outputs else np.zeros((0, width), dtype=np.float32)
    at = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    parts = runtime.gather_objects((at, mine))
    width = max(part.shape[-1] for _, part in parts)
    logits = np.full((num_rows, width), np.nan, dtype=np.float32)
    for where, part in parts:
        if len(where):
            logits[where] = part
    return logits
