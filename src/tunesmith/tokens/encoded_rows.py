"""Encoded rows as arrays, and what was cut of them: what a chunk of texts becomes before it goes to the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tunesmith.tokens.cutting import EncodedRow
from tunesmith.tokens.token_encoder import UNKNOWN
from tunesmith.tokens.token_rows import Ragged, TokenRows


@dataclass(frozen=True, slots=True)
class CutCount:
    """Sums over rows; `unknown`: of some cut tokens it is not known which text they are of."""

    rows: int = 0
    tokens: int = 0
    second: int = 0
    unread: int = 0
    unknown: bool = False

    def __add__(self, other: CutCount) -> CutCount:
        return CutCount(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.second + other.second,
            self.unread + other.unread,
            self.unknown or other.unknown,
        )


def count_cuts(encoded: Sequence[EncodedRow]) -> CutCount:
    """What was cut of these rows."""
    cut = [row for row in encoded if row.cut]
    return CutCount(
        len(cut),
        sum(row.cut for row in cut),
        sum(row.cut_second for row in cut),
        sum(row.unread for row in cut),
        any(row.cut_second == UNKNOWN for row in cut),
    )


def make_token_rows(encoded: Sequence[EncodedRow], *, has_types: bool) -> TokenRows:
    """The rows as arrays."""
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(row.ids) for row in encoded], out=offsets[1:])
    ends = np.array([0, len(encoded)], dtype=np.int64)

    def flatten(lists: Iterator[list[int]], dtype: type[np.signedinteger[Any]]) -> Ragged:
        values = np.fromiter(chain.from_iterable(lists), dtype=dtype, count=int(offsets[-1]))
        return Ragged(((values, offsets),), ends)

    columns = {"input_ids": flatten((row.ids for row in encoded), np.int32)}
    if has_types:
        columns["token_type_ids"] = flatten((row.types for row in encoded), np.int8)
    return TokenRows(columns, np.diff(offsets).astype(np.int32), None)


def join_token_rows(parts: Sequence[TokenRows]) -> TokenRows:
    """The rows of all parts, one part behind the other; nothing is copied but the lengths."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    columns = {
        name: Ragged(tuple(chain.from_iterable(part.columns[name].chunks for part in parts)), starts)
        for name in parts[0].columns
    }
    return TokenRows(columns, np.concatenate([part.lengths for part in parts]), None)
