"""A source: the rows of one split, on disk, and the name a person knows each row by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

LINE_COLUMN = "__line__"
"""Holds the physical line on which a record starts, for files made of lines."""

BAD_COLUMN = "__bad__"
"""Holds why a row of a file could not be read, where such rows are left out."""

SCAN_ROWS = 65_536


@dataclass(frozen=True)
class Source:
    """`origin` is the path as the user gave it, or the name of an object in memory.

    `table_file` is the Arrow file behind `dataset` when there is exactly one and all of its rows are used, in order.
    """

    name: str
    dataset: Dataset
    origin: str
    lines: bool = False
    table_file: Path | None = None
    note: str | None = None
    """How the file was read, where that is not a matter of course."""
    delimiter: str = ","
    """What sets the columns of the file apart, if it has lines."""

    @property
    def column_names(self) -> list[str]:
        """The user's columns, without those of the reader."""
        return [name for name in self.dataset.column_names if name not in (LINE_COLUMN, BAD_COLUMN)]

    def where(self, row_index: int, column: str | None = None) -> str:
        """`train.csv:812:label`: the line in a text file, the row (from 1) anywhere else."""
        number = self.line_of(row_index)
        return f"{self.origin}:{number}:{column}" if column is not None else f"{self.origin}:{number}"

    def line_of(self, row_index: int) -> int:
        """The number `where` uses for a row."""
        if not self.lines:
            return row_index + 1
        return int(self.dataset.with_format("arrow")[row_index][LINE_COLUMN][0].as_py())

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """(index of the first row, pyarrow Table of `columns`) for one batch after the other, in order."""
        if self.table_file is not None:
            yield from _scan_file(self.table_file, columns)
        else:
            yield from scan_dataset(self.dataset, columns)


def scan_dataset(dataset: Dataset, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Like `Source.scan`, for rows that may be selected, reordered or in memory."""
    start = 0
    for table in dataset.select_columns(list(columns)).with_format("arrow").iter(SCAN_ROWS):
        # A dataset with selected rows gives a chunk for every run of neighbours, often one a row.
        yield start, table.combine_chunks()
        start += table.num_rows


def _scan_file(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    # Plain reads, not the memory map: touched pages of a map count as resident, so a scan of a map grows with the file.
    import pyarrow as pa

    start = 0
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield start, pa.Table.from_batches([batch.select(list(columns))])
            start += batch.num_rows


def checked(source: Source) -> Source:
    """The source, which must have rows."""
    if source.dataset.num_rows == 0:
        raise DataError("no rows", where=source.origin, fix="It needs at least one row.")
    return source
