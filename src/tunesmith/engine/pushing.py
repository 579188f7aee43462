"""Adversarial steps: each batch is read twice, the second time with the word embedding moved a little to where the loss grows
fastest, and the step takes the mean of both losses (the fast gradient method, Miyato and others 2017).

Only tensor operations, without a hook or a copy from the host: a step stays one that a CUDA graph can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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
