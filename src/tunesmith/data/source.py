"""A source: the rows of one split, and the name a person knows each row by. A part: the rows of a source that make up one split,
with their encoded labels. Their content has a fingerprint: same rows in the same order, same fingerprint, whatever file they
came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.errors import DataError, did_you_mean
from tunesmith.labels import LabelMap

if TYPE_CHECKING:
    from datasets import Dataset

LINE_COLUMN = "__line__"
"""Holds the physical line on which a record starts, for files made of lines."""

BAD_COLUMN = "__bad__"
"""Holds why a row of a file could not be read, where such rows are left out."""

SCAN_ROWS = 65_536


@dataclass(frozen=True)
class Source:
    """`origin` is the path as the user wrote it, or the name of an object in memory."""

    name: str
    dataset: Dataset
    origin: str
    lines: bool = False
    note: str | None = None
    """How the file was read, if that is not obvious."""

    @property
    def column_names(self) -> list[str]:
        """The user's columns, without those of the reader."""
        return [name for name in self.dataset.column_names if name not in (LINE_COLUMN, BAD_COLUMN)]

    def where(self, row_index: int, column: str | None = None) -> str:
        """`train.csv:812:label`: the line in a text file, the row (from 1) anywhere else."""
        return f"{self.origin}:{self.line_of(row_index)}" + ("" if column is None else f":{column}")

    def line_of(self, row_index: int) -> int:
        """The number `where` uses for a row."""
        if not self.lines:
            return row_index + 1
        return int(self.dataset.with_format("arrow")[row_index][LINE_COLUMN][0].as_py())

    def type_of(self, column: str) -> Any:
        """The Arrow type of a column."""
        return self.dataset.data.schema.field(column).type

    def holds_text(self, column: str) -> bool:
        """Whether the cells of a column are strings."""
        return str(self.type_of(column)) in ("string", "large_string", "string_view")

    def no_column(self, name: str, flag: str) -> DataError:
        """The error for a column that is not there; `flag` names another one."""
        found = self.column_names
        fix = " ".join(filter(None, (did_you_mean(name, found), f"Set {flag}.")))
        where = f"{self.origin}:1" if self.lines else self.origin
        return DataError(f"no column {name!r}; found: {', '.join(found)}", where=where, fix=fix)

    def with_rows(self, dataset: Dataset, name: str | None = None) -> Source:
        """Return the same source with different rows."""
        return replace(self, name=name or self.name, dataset=dataset)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """(index of the first row, pyarrow Table of `columns`) for one batch after the other, in order."""
        start = 0
        for table in self.dataset.select_columns(list(columns)).with_format("arrow").iter(SCAN_ROWS):
            yield start, table.combine_chunks()  # selected rows come in a chunk for every run of neighbors
            start += table.num_rows


def checked(source: Source) -> Source:
    """The source; one without rows is refused."""
    if source.dataset.num_rows == 0:
        raise DataError("no rows", where=source.origin, fix="It needs at least one row.")
    return source


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

    def where(self, row: int) -> str:
        """Return `train.csv:812` for a row of this part."""
        return self.source.where(int(row if self.rows is None else self.rows[row]))

    @classmethod
    def of(cls, dataset: Dataset, name: str = "train") -> Part:
        """All rows of a dataset that has the column "labels"."""
        return cls(Source(name, dataset, name), dataset)


def fingerprint_parts(parts: Mapping[str, Part], text: Sequence[str], labels: LabelMap) -> tuple[str, dict[str, str]]:
    """sha256 (hex) over split names, texts, labels, label names and their order, and one for each split.

    Columns that are neither text nor label do not count.
    """
    whole = hashlib.sha256(json.dumps([labels.to_json(), list(text)]).encode())
    found = {}
    for split, part in parts.items():
        pieces = [f"\n{split} {len(part)}".encode(), *(_hash_text(part, name) for name in text), _hash_labels(part)]
        found[split] = hashlib.sha256(b"".join(pieces)).hexdigest()
        whole.update(b"".join(pieces))
    return whole.hexdigest(), found


def _hash_text(part: Part, name: str) -> bytes:
    """Lengths and bytes are hashed apart, so that the result does not depend on how rows are cut into batches."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths, content = hashlib.sha256(), hashlib.sha256()
    for table in part.scan([name]):
        cells = pc.fill_null(table.column(name).cast(pa.large_string()).combine_chunks(), "")
        if not len(cells):
            continue
        lengths.update(pc.binary_length(cells).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        _, offsets, data = cells.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)
        first, last = ends[cells.offset], ends[cells.offset + len(cells)]
        if data is not None:
            content.update(memoryview(data)[first:last])
    return lengths.digest() + content.digest()


def _hash_labels(part: Part) -> bytes:
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = part.labels()
    if pa.types.is_list(cells.type):
        cells = pc.list_flatten(cells)
    return hashlib.sha256(np.ascontiguousarray(cells.to_numpy(zero_copy_only=False)).tobytes()).digest()
