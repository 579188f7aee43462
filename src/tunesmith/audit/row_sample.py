"""An evenly spread sample of the rows of a part, with their columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.audit.text_survey import Ints
from tunesmith.reading.source import Part


@dataclass(frozen=True)
class RowSample:
    """`rows` are places within the part, ascending; `columns` hold the cells of these rows."""

    rows: Ints
    columns: dict[str, list[Any]]


def sample_rows(part: Part, names: list[str], most: int) -> RowSample:
    """At most `most` rows, from the whole length of the part."""
    count = len(part)
    rows = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    table = part.source.dataset.select(rows if part.rows is None else part.rows[rows])
    cells = table.select_columns(names).with_format("arrow")[:] if names else None
    return RowSample(rows, {name: cells.column(name).to_pylist() for name in names} if cells is not None else {})
