"""A part: the rows of a source that make up one split, with their encoded labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.reading.source import Source

if TYPE_CHECKING:
    from datasets import Dataset

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """`rows` are the row numbers used, in ascending order; None for all. `encoded` has every row of the source."""

    source: Source
    encoded: Dataset
    rows: Ints | None = None

    def dataset(self) -> Dataset:
        """The rows used."""
        return self.encoded if self.rows is None else self.encoded.select(self.rows)

    def __len__(self) -> int:
        return int(self.encoded.num_rows) if self.rows is None else len(self.rows)

    def scan(self, columns: Sequence[str]) -> Iterator[Any]:
        """Tables of the source's columns, only the rows used, read from the file rather than its memory map."""
        for start, table in self.source.scan(columns):
            if self.rows is None:
                yield table
                continue
            low, high = np.searchsorted(self.rows, (start, start + table.num_rows))
            yield table.take(self.rows[low:high] - start)

    def labels(self) -> Any:
        """The encoded labels of the rows used, as one Arrow array."""
        table = self.encoded.select_columns(["labels"]).with_format("arrow")[:]
        column = table.column("labels").combine_chunks()
        return column if self.rows is None else column.take(self.rows)

    @classmethod
    def of(cls, dataset: Dataset, name: str = "train") -> Part:
        """All rows of a dataset that has the column "labels"."""
        return cls(Source(name, dataset, name), dataset)
