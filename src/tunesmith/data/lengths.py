"""How long the rows are and what padding costs: the numbers behind `tunesmith inspect`. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.data.tokens import Sampling, epoch_order

Lengths = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Tokens a row."""

    rows: int
    shortest: int
    mean: float
    median: int
    p95: int
    longest: int


@dataclass(frozen=True, slots=True)
class Bin:
    """`rows` rows have from `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True, slots=True)
class PaddingCost:
    """What one epoch computes with one way of making batches: `tokens` of text in `padded` places."""

    way: str
    tokens: int
    padded: int

    @property
    def share(self) -> float:
        """The share of the places that holds padding."""
        return 1 - self.tokens / self.padded if self.padded else 0.0


def summarize_lengths(lengths: Lengths) -> LengthSummary:
    """The usual numbers; `p95` is a length that 95% of the rows do not exceed."""
    low, median, p95, high = (int(v) for v in np.quantile(lengths, (0, 0.5, 0.95, 1), method="inverted_cdf"))
    return LengthSummary(len(lengths), low, float(lengths.mean()), median, p95, high)


def count_lengths(lengths: Lengths, *, bins: int = 12) -> tuple[Bin, ...]:
    """A histogram with bins of one round width (1, 2, 4, 5, 8, 10, 16, 20, ...)."""
    low, high = int(lengths.min()), int(lengths.max())
    width = _round_width((high - low + 1) / bins)
    first = low // width
    counts = np.bincount(np.asarray(lengths, dtype=np.int64) // width - first)
    return tuple(Bin((first + i) * width, (first + i + 1) * width - 1, int(n)) for i, n in enumerate(counts))


def draw_histogram(
    bins: Sequence[Bin], *, width: int = 40, max_length: int | None = None, ascii_only: bool = False
) -> list[str]:
    """One line a bin. Bins beyond `max_length` are marked; a bin with rows has a bar of at least one character."""
    most = max(b.rows for b in bins)
    digits = len(str(bins[-1].high))
    bar = "#" if ascii_only else "█"
    lines = []
    for b in bins:
        size = 0 if not b.rows else max(1, round(width * b.rows / most))
        mark = ""
        if max_length is not None and b.high > max_length:
            mark = "  cut" if b.low > max_length else "  partly cut"
        lines.append(f"{b.low:>{digits}} to {b.high:>{digits}}  {bar * size:<{width}} {b.rows}{mark if b.rows else ''}")
    return lines


def padding_cost(
    lengths: Lengths, *, batch_size: int, sampling: Sampling, seed: int = 42, shuffle_window: int = 50
) -> tuple[int, int]:
    """(tokens, places) of the first epoch when each batch is padded to its longest row."""
    order = epoch_order(
        len(lengths),
        seed=seed,
        epoch=0,
        rows_per_step=batch_size,
        sampling=sampling,
        lengths=lengths,
        shuffle_window=shuffle_window,
    )
    longest = np.maximum.reduceat(np.asarray(lengths, dtype=np.int64)[order.rows], order.starts[:-1])
    return int(lengths.sum(dtype=np.int64)), int((longest * np.diff(order.starts)).sum())


def compare_padding(
    lengths: Lengths, *, batch_size: int, max_length: int, seed: int = 42, shuffle_window: int = 50
) -> tuple[PaddingCost, ...]:
    """Fixed length, then batches padded to their longest row in random order, then the same with rows of like length."""
    tokens, random = padding_cost(lengths, batch_size=batch_size, sampling="random", seed=seed)
    _, grouped = padding_cost(
        lengths, batch_size=batch_size, sampling="group_by_length", seed=seed, shuffle_window=shuffle_window
    )
    return (
        PaddingCost(f"every row padded to {max_length}", tokens, max_length * len(lengths)),
        PaddingCost("padded to the longest of the batch, random order", tokens, random),
        PaddingCost("the same, rows of similar length together", tokens, grouped),
    )


def _round_width(least: float) -> int:
    power = 1
    while True:
        for step in (1, 2, 4, 5, 8):
            if step * power >= least:
                return step * power
        power *= 10
