"""Which rows each optimizer step sees. The order of an epoch is a pure function of (seed, epoch): nothing to save."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tunesmith.errors import ConfigError

Sampling = Literal["random", "sequential", "group_by_length"]


@dataclass(frozen=True)
class EpochOrder:
    """Window i holds `rows[starts[i]:starts[i + 1]]`: all rows of one optimizer step, over all micro-batches and ranks."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Rows of one optimizer step."""
        return self.rows[self.starts[index] : self.starts[index + 1]]


def epoch_order(
    num_rows: int,
    *,
    seed: int,
    epoch: int,
    rows_per_step: int,
    sampling: Sampling = "random",
    lengths: npt.NDArray[Any] | None = None,
    shuffle_window: int = 50,
    token_budget: int | None = None,
    drop_last: bool = False,
) -> EpochOrder:
    """The windows of one epoch. Every row occurs once; with `drop_last` all but the last few of the epoch's random order.

    With `group_by_length`, rows of similar length share a step. Sorting spans `shuffle_window` steps, not the
    epoch: sorting the whole epoch makes the loss curve saw-tooth.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed & (2**63 - 1), epoch]))
    rows = np.arange(num_rows) if sampling == "sequential" else rng.permutation(num_rows)
    if drop_last and token_budget is None:  # before they are sorted: in each epoch others are left out
        num_rows -= num_rows % rows_per_step
        rows = rows[:num_rows]
    if sampling == "group_by_length" or token_budget is not None:
        if lengths is None:
            raise ConfigError("length grouping and token budgets need the length of every row")
        span = max(rows_per_step, 1) * shuffle_window
        for start in range(0, num_rows, span):
            part = rows[start : start + span]
            rows[start : start + span] = part[np.argsort(-lengths[part], kind="stable")]
    if token_budget is not None:
        assert lengths is not None
        return _within_budget(rows, lengths, token_budget, rng)
    starts = np.append(np.arange(0, num_rows, rows_per_step), num_rows).astype(np.int64)
    if sampling == "group_by_length":
        rows = _shuffle_full_windows(rows, rows_per_step, shuffle_window, rng)
    return EpochOrder(rows, starts)


def _shuffle_full_windows(
    rows: npt.NDArray[np.int64], size: int, shuffle_window: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Full windows change places within their span; the ragged tail stays last."""
    full = len(rows) // size
    grid = rows[: full * size].reshape(full, size)
    for start in range(0, full, shuffle_window):
        part = grid[start : start + shuffle_window]
        grid[start : start + shuffle_window] = part[rng.permutation(len(part))]
    return rows


def _within_budget(
    rows: npt.NDArray[np.int64], lengths: npt.NDArray[Any], budget: int, rng: np.random.Generator
) -> EpochOrder:
    """Windows of as many rows as fit `budget` tokens (one row at least), in random order."""
    ends = np.cumsum(lengths[rows], dtype=np.int64).tolist()
    cuts, used = [0], 0
    while cuts[-1] < len(ends):  # one look a window, not one a row
        cuts.append(max(bisect_right(ends, used + budget, cuts[-1]), cuts[-1] + 1))
        used = ends[cuts[-1] - 1]
    bounds = np.asarray(cuts if len(cuts) > 1 else [0, 0], dtype=np.int64)
    shuffled = rng.permutation(len(bounds) - 1)
    sizes = np.diff(bounds)[shuffled]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    return EpochOrder(rows[np.repeat(bounds[:-1][shuffled] - starts[:-1], sizes) + np.arange(len(rows))], starts)


def length_batches(
    lengths: npt.NDArray[Any],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of batches sorted by length, longest first, within the limits of `evaluation_batches`."""
    order = np.argsort(-lengths, kind="stable")[rank::world]
    start = 0
    while start < len(order):
        size = len(order) if max_rows is None else max_rows
        if max_tokens is not None:
            size = max(1, min(size, max_tokens // max(int(lengths[order[start]]), 1)))
        yield order[start : start + size]
        start += size
