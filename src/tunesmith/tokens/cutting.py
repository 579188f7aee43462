"""Rows that are too long for the model: what is left of them, in texts and in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

CHARS_A_TOKEN = 256
LEAST_CHARS = 65_536
"""Of a text, `max_length` times 256 characters are read, and at least 65,536, up to a blank near that place. A text takes
some 200 bytes a character while it is tokenized: one of 16 MB took 4.3 GB. Words that blanks set apart are tokenized one by
one, so the tokens up to `max_length` are the same, unless a token has more than 256 characters on average."""
LongTexts = Literal["head", "head_tail", "windows", "full"]
"""What the model sees of a row that is too long: docs/how_to/better_models.md."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row as the model gets it; `cut` tokens were dropped, `cut_second` of them from the second text (-1: unknown).

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
    """At most so many characters, ending before a blank if there is one in the second half."""
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
    """How many tokens of each text stay: the longer one is cut down to the shorter, then both alike."""
    short, long = sorted(sizes)
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if sizes[0] <= sizes[1] else (long, short)
