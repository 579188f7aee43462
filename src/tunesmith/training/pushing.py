"""Adversarial steps: each batch is read twice, the second time with the word embedding moved a little to where the loss grows
fastest, and what the outputs of the second reading differ from those of the first is added to the loss (virtual adversarial
training, Miyato and others 2018, with the direction of the loss).

Only tensor operations, without a hook or a copy from the host: a step stays one that a CUDA graph can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch


@dataclass
class TwoReadings:
    """The objective of both readings of a window: the loss, whose outputs are kept, then how far others are from them."""

    objective: Any
    """A TaskLoss."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    again: bool = False

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of an objective."""
        if self.again:
            logits = model(**batch.inputs).logits
            return self.objective.divergence(logits, self.outputs.pop(0)), logits
        loss, logits = self.objective.sum(model, batch)
        self.outputs.append(logits.detach())
        return loss, logits

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """As of an objective."""
        return float(self.objective.weight(labels, rows))


@contextmanager
def pushed(model: nn.Module, size: float) -> Iterator[None]:
    """Inside, the rows of the word embedding that have a gradient are moved along it; afterwards they are as before, to the bit.

    All of them together are moved by `size` times their norm: rows that occur in no batch neither move nor count.
    """
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    gradient = weight.grad
    if gradient is None:  # frozen
        yield
        return
    with torch.no_grad():
        kept, gradient = weight.detach().clone(), gradient.float()
        squares = gradient.square().sum(1)
        length = (kept.float().square().sum(1) * (squares > 0)).sum().sqrt()
        weight.add_((gradient * (size * length / squares.sum().sqrt().clamp_min(1e-30))).to(weight.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
