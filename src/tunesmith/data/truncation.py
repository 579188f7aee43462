"""Rows that are too long for the model: what is left of them, in texts and in tokens, and the sentence that reports it.

A long row may also be read as windows, each as long as the model takes; the mean of their logits is the answer. In training a
batch has one window of such a row, drawn by the rows of the batch: another in each epoch, the same after a resume, and no more
work than with a cut row. Predictions read all windows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

CHARS_A_TOKEN = 256
LEAST_CHARS = 65_536
"""Of a text, `max_length` times 256 characters are read, and at least 65,536, up to a blank near that place. A text takes
some 200 bytes a character while it is tokenized: one of 16 MB took 4.3 GB. Words that blanks set apart are tokenized one by
one, so the tokens up to `max_length` are the same, unless a token has more than 256 characters on average."""
UNKNOWN = -1
LongTexts = Literal["head", "head_tail", "windows", "full"]
"""What the model sees of a row that is too long: docs/research/recipes.md."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row as the model gets it; `cut` tokens were dropped, `cut_second` of them from the second text, or UNKNOWN.

    `unread`: a text was so long that its end was never tokenized: it counts as one more token cut.
    """

    ids: list[int]
    types: list[int]
    cut: int = 0
    cut_second: int = 0
    unread: bool = False


def shorten(texts: Sequence[list[str]], max_length: int, side: str) -> tuple[Sequence[list[str]], dict[int, bool]]:
    """The texts without what no row of `max_length` tokens can hold; the rows of which something is missing.

    The value says whether it is the second text of the row alone.
    """
    most = max(LEAST_CHARS, CHARS_A_TOKEN * max_length)
    unread: dict[int, bool] = {}
    columns = []
    for number, column in enumerate(texts):
        long = [i for i, cell in enumerate(column) if len(cell) > most]
        if long:
            column = list(column)
        for i in long:
            column[i] = _part_of(column[i], most, side)
            unread.setdefault(i, number == 1)
        columns.append(column)
    return columns, unread


def _part_of(text: str, most: int, side: str) -> str:
    if side == "both":
        return f"{_start_of(text, most // 2)} {_end_of(text, most // 2 - 1)}"
    return _end_of(text, most) if side == "left" else _start_of(text, most)


def _start_of(text: str, most: int) -> str:
    """At most this many characters, ending before a blank if there is one in the second half."""
    blanks = (i for i in range(most, most // 2, -1) if text[i].isspace())
    return text[: next(blanks, most)]


def _end_of(text: str, most: int) -> str:
    blanks = (i for i in range(len(text) - most, len(text) - most // 2) if text[i].isspace())
    return text[next(blanks, len(text) - most) :]


def cut_row(whole: Any, max_length: int, side: str) -> EncodedRow:
    """A whole encoding with tokens of its texts dropped until it fits, as `truncation="longest_first"` does.

    With `side` both, each text that is cut keeps its beginning and its end.
    """
    sides = whole.sequence_ids
    sizes = (sides.count(0), sides.count(1))
    kept = share_longest_first(sizes, max_length - (len(sides) - sum(sizes)))
    ids, types = whole.ids, whole.type_ids
    spans = [(sides.index(s), n, k) for s, (n, k) in enumerate(zip(sizes, kept, strict=True)) if n > k]
    for start, size, keep in sorted(spans, reverse=True):
        before = {"left": 0, "right": keep, "both": keep - keep // 2}[side]
        drop = slice(start + before, start + before + size - keep)
        del ids[drop], types[drop]
    return EncodedRow(ids, types, sum(sizes) - sum(kept), sizes[1] - kept[1])


def share_longest_first(sizes: tuple[int, int], room: int) -> tuple[int, int]:
    """The number of tokens kept of each text: the longer one is cut down to the shorter, then both equally."""
    short, long = sorted(sizes)
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if sizes[0] <= sizes[1] else (long, short)


MOST_WINDOWS = 8
"""The most windows of a row; the rest of the row is cut."""


@dataclass(frozen=True)
class TextWindows:
    """Windows of `length` tokens, including the special tokens before and behind the text."""

    length: int
    before: int
    behind: int
    drawn: bool = False
    """Whether a batch has a random window of a row; otherwise the first."""

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
        """One window of each row of a batch."""
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


@dataclass(frozen=True, slots=True)
class CutCount:
    """Sums over rows; `unknown`: rows of which it is not known which text the cut tokens are of."""

    rows: int = 0
    tokens: int = 0
    second: int = 0
    unread: int = 0
    unknown: int = 0

    @classmethod
    def of(cls, cuts: npt.NDArray[np.int32]) -> CutCount:
        """Of rows with (`cut`, `cut_second`, `unread`) each, as in EncodedRow."""
        tokens, second, unread = cuts.sum(axis=0, dtype=np.int64).tolist()
        return cls(int((cuts[:, 0] > 0).sum()), tokens, second, unread, int((cuts[:, 1] == UNKNOWN).sum()))

    def __add__(self, other: CutCount) -> CutCount:
        return CutCount(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def in_split(self, rows: int, sides: int, max_length: int) -> TruncationCount:
        """The same for a split of so many rows, each of one text or two."""
        by_side = None if self.unknown else (self.tokens - self.second, self.second)[:sides]
        return TruncationCount(rows, self.rows, self.tokens, by_side, max_length, self.unread)


@dataclass(frozen=True, slots=True)
class TruncationCount:
    """What `max_length` cut off in one split. `by_side`: tokens cut of each text; None when the tokenizer cannot tell."""

    rows: int
    rows_cut: int
    tokens_cut: int
    by_side: tuple[int, ...] | None
    max_length: int
    unread: int = 0
    """Rows with a text so long that its end was never tokenized: the tokens in it are not counted."""

    def sentence(self, split: str) -> str:
        """One line for a person."""
        if not self.rows_cut:
            return f"{split}: no row is longer than {self.max_length} tokens"
        share = 100 * self.rows_cut / self.rows
        sides = f" ({' + '.join(str(n) for n in self.by_side)})" if self.by_side and len(self.by_side) > 1 else ""
        return (
            f"{split}: {self.rows_cut} of {self.rows} rows ({share:.1f}%) were cut at {self.max_length} tokens, "
            f"{'at least ' if self.unread else ''}{self.tokens_cut}{sides} tokens lost"
        )


def describe_empty(what: str, rows: Sequence[int]) -> str:
    """One line about rows without a token of text."""
    count = "1 row has" if len(rows) == 1 else f"{len(rows):,} rows have"
    return (
        f"Warning: {what}: {count} no token of text (first: row {rows[0] + 1}): the model sees nothing of them. "
        "Remove them, or look for characters that the tokenizer drops."
    )
