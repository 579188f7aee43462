"""The loss of each task as a sum over rows, and the weight that sum is divided by once per optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tunesmith.labels import Task
from tunesmith.tokens.batches import Batch

IGNORED = -100


class Objective(Protocol):
    """What is minimised: `sum(...) / weight(...)` over all rows of an optimizer step."""

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed loss of a micro-batch (a scalar that can be differentiated) and its logits."""
        ...

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """What the sum is divided by, from the labels of the whole step (all micro-batches, all ranks)."""
        ...


@dataclass(frozen=True)
class TaskLoss:
    """Cross entropy, binary cross entropy per label, or squared error; with class weights and label smoothing."""

    task: Task
    num_labels: int
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed loss and the logits."""
        logits = model(**batch.inputs).logits
        assert batch.labels is not None
        return self.of_logits(logits, batch.labels), logits

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss in fp32; unlabelled rows add nothing."""
        logits = logits.float()
        if self.task is Task.REGRESSION:
            known = ~torch.isnan(labels)
            return ((logits.reshape(labels.shape) - torch.where(known, labels, 0.0)).square() * known).sum()
        if self.task is Task.MULTILABEL:
            return functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")
        weight = None if self.class_weights is None else _on_device(self.class_weights, logits.device)
        targets = torch.where(labels < 0, IGNORED, labels)
        return functional.cross_entropy(
            logits, targets, weight=weight, reduction="sum", ignore_index=IGNORED, label_smoothing=self.label_smoothing
        )

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """Labelled rows; with class weights, the sum of the weights of their labels."""
        if labels is None:
            return 0.0
        if self.task is Task.REGRESSION:
            return float(np.count_nonzero(~np.isnan(labels)))
        if self.task is Task.MULTILABEL:
            return float(labels.size)
        known = labels[labels >= 0]
        if self.class_weights is None:
            return float(len(known))
        # fp32 weights, as torch divides by their fp32 values
        return float(np.asarray(self.class_weights, dtype=np.float32)[known].sum(dtype=np.float64))


@functools.cache
def _on_device(weights: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Made once: a captured step may not copy from the host."""
    return torch.tensor(weights, device=device)


def resolve_class_weights(
    wanted: str | Sequence[float] | Mapping[str, float] | None, labels: npt.NDArray[Any], names: Sequence[str]
) -> tuple[float, ...] | None:
    """`balanced` gives n / (k * count) as scikit-learn does; a list is in id order; a mapping goes by name."""
    from tunesmith.errors import ConfigError

    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted != "balanced":
            raise ConfigError(f"class_weights {wanted!r} is neither 'balanced' nor a list of {len(names)} numbers")
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        return tuple(float(counts.sum() / (len(names) * max(int(c), 1))) for c in counts)
    if isinstance(wanted, Mapping):
        missing = [n for n in names if n not in wanted]
        if missing:
            raise ConfigError(f"class_weights has no weight for {', '.join(missing)}")
        return tuple(float(wanted[n]) for n in names)
    if len(wanted) != len(names):
        raise ConfigError(f"class_weights has {len(wanted)} numbers for {len(names)} labels ({', '.join(names)})")
    return tuple(float(w) for w in wanted)
