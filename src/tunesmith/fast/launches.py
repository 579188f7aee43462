"""Steps that a host launches kernel by kernel: whether their kernels are done before the next ones are launched."""

from __future__ import annotations

from torch import nn

LARGEST = 3e9
"""Tokens times the weights of a matrix, on average. BERT-base's step (1.2 million weights a matrix) takes as long in float32 as
under autocast at 2,500 tokens on an H200 (docs/performance.md)."""


def is_launch_bound(model: nn.Module, tokens: float) -> bool:
    """Whether a float32 step of so many tokens on a GPU takes the time of its launches, not that of its products.

    By arithmetic alone, so that the same run is decided in the same way wherever it starts again.
    """
    sizes = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)]
    return bool(sizes) and tokens * sum(sizes) / len(sizes) < LARGEST
