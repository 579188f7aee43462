"""The loss of each task as a sum over rows and the weight by which it is divided once per optimizer step; predictions for
every row of a split with that loss, in input order, over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tunesmith.data.batches import Batch, Collate, TokenRows, evaluation_batches, pin_batch, prefetched
from tunesmith.errors import ConfigError, ResourceError
from tunesmith.labels import Task
from tunesmith.training.distributed import Runtime
from tunesmith.training.step import split_batch

IGNORED = -100


class Objective(Protocol):
    """The training objective: `sum(...) / weight(...)` over all rows of an optimizer step."""

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss of a micro-batch (a differentiable scalar) and its logits."""
        ...

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """Return the divisor of the sum, from the labels of the whole step (all micro-batches, all ranks)."""
        ...


@dataclass(frozen=True)
class TaskLoss:
    """Cross entropy, binary cross entropy per label, or squared error; with class weights and label smoothing.

    Single-label classes may also be targets with a probability for each.
    """

    task: Task
    num_labels: int
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss and the logits."""
        logits = model(**batch.inputs).logits
        assert batch.labels is not None
        return self.of_logits(logits, batch.labels), logits

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed loss in fp32; unlabeled rows add nothing."""
        logits = logits.float()
        if self.task is Task.REGRESSION:
            known = ~torch.isnan(labels)
            return ((logits.reshape(labels.shape) - torch.where(known, labels, 0.0)).square() * known).sum()
        if self.task is Task.MULTILABEL:
            return functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")
        weight = None if self.class_weights is None else _on_device(self.class_weights, logits.device)
        if labels.dim() == 2:  # a probability for each class
            return functional.cross_entropy(
                logits, labels, weight=weight, reduction="sum", label_smoothing=self.label_smoothing
            )
        targets = torch.where(labels < 0, IGNORED, labels)
        return functional.cross_entropy(
            logits, targets, weight=weight, reduction="sum", ignore_index=IGNORED, label_smoothing=self.label_smoothing
        )

    def divergence(self, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the summed distance to the outputs of another forward pass: KL divergence or squared difference."""
        logits, before = logits.float(), before.float()
        if self.task is Task.REGRESSION:
            return (logits - before).square().sum()
        if self.task is Task.MULTILABEL:
            logits, before = (torch.stack([table, torch.zeros_like(table)], -1) for table in (logits, before))
        return functional.kl_div(logits.log_softmax(-1), before.log_softmax(-1), reduction="sum", log_target=True)

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """Return the number of labeled rows; with class weights, the sum of their weights."""
        if labels is None:
            return 0.0
        if self.task is Task.REGRESSION:
            return float(np.count_nonzero(~np.isnan(labels)))
        if self.task is Task.MULTILABEL:
            return float(labels.size)
        if self.class_weights is None:
            return float(len(labels) if labels.ndim == 2 else np.count_nonzero(labels >= 0))
        # fp32 weights, as torch divides by their fp32 values
        weights = np.asarray(self.class_weights, dtype=np.float32)
        if labels.ndim == 2:  # the expected weight
            return float((labels @ weights).sum(dtype=np.float64))
        return float(weights[labels[labels >= 0]].sum(dtype=np.float64))


@functools.cache
def _on_device(weights: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the weights on the device; cached, because a CUDA graph may not copy from the host."""
    return torch.tensor(weights, device=device)


def resolve_class_weights(
    wanted: Literal["balanced"] | Sequence[float], labels: npt.NDArray[Any], names: Sequence[str]
) -> tuple[float, ...]:
    """Return class weights in id order. `balanced` is n / (k * count) as in scikit-learn."""
    if wanted == "balanced":
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        return tuple(float(counts.sum() / (len(names) * max(int(c), 1))) for c in counts)
    if len(wanted) != len(names):
        raise ConfigError(f"class_weights has {len(wanted)} numbers for {len(names)} labels ({', '.join(names)})")
    return tuple(float(w) for w in wanted)


TOKENS_AT_ONCE = {False: 4096, True: 32_768}
"""Tokens per batch on a CPU and on a GPU. MiniLM-L6 on one core took 7% longer with 512 tokens and with 8,192."""


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
    """Return one prediction per row, in input order. The model's train or eval mode is kept.

    Without limits, the number of tokens per batch depends on the device.
    """
    if max_rows is None and max_tokens is None:
        max_tokens = TOKENS_AT_ONCE[runtime.device.type == "cuda"]
    source = evaluation_batches(
        rows, collate, max_rows=max_rows, max_tokens=max_tokens, rank=runtime.rank, world=runtime.world
    )
    if runtime.device.type == "cuda":  # prepare and copy batches while the device computes
        source = prefetched(source, pin_batch)
    was_training = model.training
    model.eval()
    places: list[npt.NDArray[np.int64]] = []
    outputs: list[torch.Tensor] = []
    loss_sum = torch.zeros((), dtype=torch.float64, device=runtime.device)
    try:
        with torch.inference_mode():
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


def _forward_all(
    model: nn.Module, source: Iterator[Batch], runtime: Runtime, objective: Objective | None
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor | None]]:
    """Yield each batch with its logits and summed loss; a batch that doesn't fit into memory is halved until it does."""
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
    """Return the logits of all ranks in row order."""
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
