"""Rows that are longer than the model takes, as windows, each of which it takes; the mean of their logits is the answer.

In training a batch has one window of such a row, drawn by the rows of the batch: another in each epoch, the same after a
resume, and no more work than with a cut row. Predictions read all windows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_WINDOWS = 8
"""Of a row; what is beyond them is cut."""


@dataclass(frozen=True)
class TextWindows:
    """`length` tokens, the special ones before and behind the text among them."""

    length: int
    before: int
    behind: int
    drawn: bool = False
    """Which window a batch has: one by chance, else the first."""

    @property
    def room(self) -> int:
        """Tokens of text in a window."""
        return self.length - self.before - self.behind

    @property
    def longest(self) -> int:
        """Tokens of a row that all windows together hold."""
        return MOST_WINDOWS * self.room + self.before + self.behind

    def starts(self, tokens: int) -> list[int]:
        """Where in its text the windows of a row begin: as few as cover it, spread evenly."""
        text = tokens - self.before - self.behind
        last = max(0, -(-text // self.room) - 1)
        return [round(k * (text - self.room) / last) for k in range(last + 1)] if last else [0]

    def part(self, values: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        """The window of a row that begins at `start`, with the special tokens of the row."""
        if len(values) <= self.length:
            return values
        at = self.before + start
        ends = values[: self.before], values[len(values) - self.behind :]
        return np.concatenate([ends[0], values[at : at + self.room], ends[1]])

    def shown(
        self, tokens: dict[str, list[npt.NDArray[Any]]], rows: npt.NDArray[Any]
    ) -> dict[str, list[npt.NDArray[Any]]]:
        """The rows of a batch, one window of each."""
        starts = [self.starts(len(ids)) for ids in tokens["input_ids"]]
        rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(rows, dtype=np.int64).tobytes()))
        chosen = [found[int(rng.integers(len(found)))] if self.drawn else 0 for found in starts]
        return {
            name: [self.part(values, start) for values, start in zip(column, chosen, strict=True)]
            for name, column in tokens.items()
        }


def mean_by_row(logits: npt.NDArray[np.float32], owners: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The mean of the logits of each row's windows; `owners` are ascending, each row has one window at least."""
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    sums = np.add.reduceat(logits.astype(np.float64), first, axis=0)
    return (sums / np.diff(first, append=len(owners))[:, None]).astype(np.float32)
