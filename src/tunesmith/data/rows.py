"""Rows: a `Source` is the content of one file or table, a `Part` is its rows that belong to one split.

Three or more text columns are rendered into one text: training and every kind of prediction call `render_rows`, so that a model
always reads what it was trained on. Held-out rows are a seeded, stratified sample that keeps rows with equal texts together if
possible.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.errors import CheckpointError, ConfigError, DataError, did_you_mean, first_few
from tunesmith.files import BadFile, open_plain
from tunesmith.labels import LabelMap, Task
from tunesmith.models.files import library_bars_off

if TYPE_CHECKING:
    from datasets import Dataset


LINE_COLUMN = "__line__"
"""Column with the physical line on which a record starts, for files made of lines."""

BAD_COLUMN = "__bad__"
"""Column with the reason why a row could not be read, if such rows are skipped."""

TARGETS = "__targets__"
"""The column of encoded training rows with soft labels: a probability for each class."""

SCAN_ROWS = 65_536
Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Source:
    """`origin` is the path as the user wrote it, or the name of an object in memory."""

    name: str
    dataset: Dataset
    origin: str
    lines: bool = False
    note: str | None = None
    """How the file was read, if that is not obvious."""
    numbers: Ints | None = None
    """Row numbers (from 1) in `origin`, if it has no lines and only some of its rows are here."""

    @property
    def column_names(self) -> list[str]:
        """Return the user's columns, without those of the reader."""
        return [name for name in self.dataset.column_names if name not in (LINE_COLUMN, BAD_COLUMN)]

    def where(self, row_index: int, column: str | None = None) -> str:
        """Return `train.csv:812:label`: the line in a text file, the row (from 1) anywhere else."""
        return f"{self.origin}:{self.line_numbers([row_index])[0]}" + ("" if column is None else f":{column}")

    def line_numbers(self, rows: Sequence[int] | Ints) -> Ints:
        """Return the numbers that `where` uses for these rows."""
        if self.lines:
            from datasets.formatting import query_table

            lines = query_table(self.dataset.data.select([LINE_COLUMN]), rows, indices=self.dataset._indices)
            return np.asarray(lines.column(0))
        return np.asarray(rows) + 1 if self.numbers is None else self.numbers[rows]

    def select(self, rows: Sequence[int] | Ints, name: str | None = None) -> Source:
        """Return the source with only these rows; they keep their line numbers."""
        numbers = None if self.lines else self.line_numbers(rows)
        return replace(self, name=name or self.name, dataset=self.dataset.select(rows), numbers=numbers)

    def type_of(self, column: str) -> Any:
        """Return the Arrow type of a column."""
        return self.dataset.data.schema.field(column).type

    def holds_text(self, column: str) -> bool:
        """Return whether the cells of a column are strings."""
        return str(self.type_of(column)) in ("string", "large_string", "string_view")

    def label_parts(self, label: str) -> tuple[str, ...]:
        """Return the columns that a label name with commas stands for; none for a plain column."""
        parts = tuple(part.strip() for part in label.split(","))
        return parts if label not in self.column_names and len(parts) > 1 else ()

    def has_label(self, label: str) -> bool:
        """Return whether the label column, or all of its parts, are there."""
        return set(self.label_parts(label) or (label,)) <= set(self.column_names)

    def no_column(self, name: str, flag: str) -> DataError:
        """Return the error for a missing column; `flag` is the option that names it."""
        found = self.column_names
        fix = " ".join(filter(None, (did_you_mean(name, found), f"Set {flag}.")))
        where = f"{self.origin}:1" if self.lines else self.origin
        return DataError(f"no column {name!r}; found: {first_few(found, 20)}", where=where, fix=fix)

    def with_cells(self, dataset: Dataset) -> Source:
        """Return the source with other cells in the same rows."""
        return replace(self, dataset=dataset)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the first row, pyarrow Table of `columns`) for each batch in order."""
        from datasets.formatting import query_table

        cells = self.dataset.data.select(list(columns))  # select_columns copies the features of all columns
        for start in range(0, self.dataset.num_rows, SCAN_ROWS):
            rows = range(start, min(start + SCAN_ROWS, self.dataset.num_rows))
            # selected rows have one chunk for each run of adjacent rows
            yield start, query_table(cells, rows, indices=self.dataset._indices).combine_chunks()


@dataclass(frozen=True, slots=True)
class Columns:
    """`text` is one name or two; `why` says in sentences how text, label and task were chosen.

    `rendered` are the three or more columns that are rendered into the one text column.

    `default_names` are those of the label ids of a GLUE task.
    """

    text: tuple[str, ...]
    label: str
    task: Task
    why: tuple[str, ...] = ()
    default_names: tuple[str, ...] = ()
    rendered: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """Return the text columns as named in the table."""
        return self.rendered or self.text


@dataclass(frozen=True)
class Part:
    """`rows` are the row numbers used, in ascending order; None for all. `encoded` has every row of the source."""

    source: Source
    encoded: Dataset
    rows: Ints | None = None

    def dataset(self) -> Dataset:
        """Return the rows used."""
        return self.encoded if self.rows is None else self.encoded.select(self.rows)

    def __len__(self) -> int:
        return int(self.encoded.num_rows) if self.rows is None else len(self.rows)

    def scan(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield tables of the source's columns with the rows used, read from the file instead of its memory map."""
        for start, table in self.source.scan(columns):
            if self.rows is None:
                yield table
                continue
            low, high = np.searchsorted(self.rows, (start, start + table.num_rows))
            yield table.take(self.rows[low:high] - start)

    def labels(self) -> Any:
        """Return the encoded labels of the rows used, as one Arrow array."""
        return self._encoded("labels")

    def targets(self) -> npt.NDArray[np.float32] | None:
        """Return the probabilities (rows, classes) of the rows used; None if each has one certain label."""
        if TARGETS not in self.encoded.column_names:
            return None
        return np.array(self._encoded(TARGETS).to_pylist(), dtype=np.float32)

    def _encoded(self, name: str) -> Any:
        table = self.encoded.select_columns([name]).with_format("arrow")[:]
        column = table.column(name).combine_chunks()
        return column if self.rows is None else column.take(self.rows)

    def where(self, row: int) -> str:
        """Return `train.csv:812` for a row of this part."""
        return self.source.where(int(row if self.rows is None else self.rows[row]))

    def line_numbers(self, count: int) -> list[int]:
        """Return the line (or row, from 1) in the file of each of the first rows of this part."""
        rows = np.arange(count) if self.rows is None else self.rows[:count]
        return [int(number) for number in self.source.line_numbers(rows)]

    @classmethod
    def of(cls, dataset: Dataset, name: str = "train") -> Part:
        """Return all rows of a dataset that has the column "labels"."""
        return cls(Source(name, dataset, name), dataset)


def add_column(dataset: Dataset, name: str, cells: Any) -> Dataset:
    """Return the dataset with this column, in place of any column of that name."""
    import datasets

    if name in dataset.column_names:
        dataset = dataset.remove_columns(name)
    digest = hashlib.sha256(dataset._fingerprint.encode())
    for buffer in filter(None, cells.buffers()):
        digest.update(buffer)
    with library_bars_off(datasets):  # selected rows are copied first
        # A given fingerprint keeps `datasets` from hashing (by pickling) the whole column.
        return dataset.add_column(name, cells, new_fingerprint=digest.hexdigest()[:16])


def fingerprint_parts(parts: Mapping[str, Part], text: Sequence[str], labels: LabelMap) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of split names, texts, labels and label names in order, and one hash per split.

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
    """Hashes lengths and bytes separately, so that the result does not depend on the batches."""
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

    cells, targets = part.labels(), part.targets()
    if pa.types.is_list(cells.type):
        cells = pc.list_flatten(cells)
    found = hashlib.sha256(np.ascontiguousarray(cells.to_numpy(zero_copy_only=False)).tobytes())
    found.update(b"" if targets is None else targets.tobytes())
    return found.digest()


_HASH_ROWS = 10_000


def content_hash(dataset: Dataset, columns: tuple[str, ...]) -> str:
    """Return a hash of the cells of these columns in order, independent of storage and chunks."""
    import pyarrow as pa

    digest = hashlib.sha256()
    view = dataset.select_columns(list(columns)).with_format("arrow")
    for table in view.iter(batch_size=_HASH_ROWS):
        whole = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
        digest.update(sink.getvalue())
    digest.update(f"{len(dataset)} {columns}".encode())
    return digest.hexdigest()


@contextmanager
def binary_errors(kind: str, origin: str) -> Iterator[None]:
    """Turn errors of pyarrow into one line that names the file."""
    import pyarrow as pa

    try:
        yield
    except (DataError, BadFile):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, NotImplementedError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        reason = " ".join(str(error).split())[:200]
        fix = f"The file is damaged, truncated, or not {kind}: write it again."
        raise DataError(f"cannot be read as {kind} ({reason})", where=origin, fix=fix) from None


MAX_CELLS, MAX_BYTES = 50_000_000, 1_000_000_000
"""Limits of predictions.parquet: a run keeps at most 200,000 rows of each split."""


def read_prediction_columns(path: str | Path) -> dict[str, list[Any]]:
    """Read predictions.parquet: name -> values in row order; empty if the file is missing. Damage is a CheckpointError."""
    import pyarrow.parquet as pq

    try:
        with open_plain(path, follow=True) as file, binary_errors("Parquet", str(path)):
            found = pq.ParquetFile(file)
            cells = found.metadata.num_rows * found.metadata.num_columns
            size = sum(found.metadata.row_group(k).total_byte_size for k in range(found.metadata.num_row_groups))
            if cells > MAX_CELLS or size > MAX_BYTES:
                raise BadFile(f"has {cells:,} cells and {size:,} bytes, more than a run writes")
            table = found.read()
            if len(set(table.column_names)) < len(table.column_names):
                raise BadFile("has two columns with the same name")
            return {str(name): table.column(name).to_pylist() for name in table.column_names}
    except FileNotFoundError:
        return {}
    except (BadFile, DataError) as error:
        problem = error.problem if isinstance(error, DataError) else str(error)
        raise CheckpointError(problem, where=str(path), fix="Run `tunesmith predict` again.") from None


# --- three or more columns as one text per row: `title: Great phone\nbody: ...\nprice: 12.5` ---

LINE = "\n"
"""Ends a column in a rendered text; line breaks in cells become spaces."""
DIGITS, DECIMAL = 3, re.compile(r"-?[0-9]{1,15}\.[0-9]+")
"""Decimal numbers are rounded to that many significant digits, but not before the point (docs/research/more_columns.md)."""
FEWEST_ROWS = 10
"""With fewer rows, a column can match the labels by chance."""


def input_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that the model reads: these one or two, or the column that three or more are rendered into."""
    return tuple(names) if len(names) <= 2 else (",".join(names),)


def cell_text(value: Any) -> str:
    """Return a cell as text: numbers without a final .0, true or false, ISO dates; empty if it is missing (None or NaN).

    Raises a TypeError for lists and objects.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (list, tuple, set, dict, bytes, np.ndarray)):
        raise TypeError(f"{type(value).__name__}, expected text, a number, true/false or a date")
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return value.isoformat() if isinstance(value, (datetime, date, time)) else str(value)


def round_decimal(cell: str) -> str:
    """Return a decimal number with three significant digits, or all of those before the point; other cells unchanged."""
    if not DECIMAL.fullmatch(cell) or not float(cell):
        return cell
    places = max(0, DIGITS - 1 - math.floor(math.log10(abs(float(cell)))))
    if places >= len(cell.partition(".")[2]):
        return cell
    return f"{round(float(cell), places):.{max(1, places)}f}".rstrip("0").rstrip(".")


def render_rows(names: Sequence[str], columns: Sequence[Sequence[Any]], where: str = "") -> list[str]:
    """Return one text per row with a line `name: cell` for each column. Missing and blank cells are omitted.

    Decimal numbers are rounded, also those in text files.
    """
    heads = [" ".join(name.split()) for name in names]
    texts = []
    for number, row in enumerate(zip(*columns, strict=True), start=1):
        lines = []
        for name, head, value in zip(names, heads, row, strict=True):
            try:
                cell = round_decimal(" ".join(cell_text(value).split()))
            except TypeError as error:
                raise DataError(f"column {name!r} contains {error}", where=f"{where} row {number}".strip()) from None
            if cell:
                lines.append(f"{head}: {cell}")
        texts.append(LINE.join(lines))
    return texts


def is_rendered(text: str, names: Sequence[str]) -> bool:
    """Return whether a text consists of lines as `render_rows` writes them for these columns."""
    heads = tuple(f"{' '.join(name.split())}: " for name in names)
    return all(line.startswith(heads) for line in text.split(LINE))


def render_source(source: Source, names: Sequence[str]) -> Source:
    """Return the source with the column of `input_columns` added, if there are three or more names."""
    if len(names) <= 2:
        return source
    import pyarrow as pa

    texts: list[str] = []
    for _, table in source.scan(names):
        texts += render_rows(names, [table.column(name).to_pylist() for name in names], source.origin)
    return source.with_cells(add_column(source.dataset, ",".join(names), pa.array(texts, pa.large_string())))


def refuse_label_copies(part: Part, columns: Columns, labels: LabelMap) -> None:
    """Refuse one of several text columns that equals the labels or renames them: the model would read the answer."""
    if len(part) < FEWEST_ROWS or len(columns.named) == 1:
        return
    ids = part.labels().to_pylist()
    for name in columns.named:
        cells = part.source.dataset.with_format(None)[name]
        if _equal_numbers(cells, ids) if len(labels) == 1 else _renamed(map(cell_text, cells), map(str, ids)):
            rest = ",".join(other for other in columns.named if other != name)
            problem = f"column {name!r} duplicates the label in all {len(part):,} rows"
            fix = f"Omit it: --text_column_names {rest}"
            raise DataError(problem, where=part.source.where(0, name), fix=fix)


def _equal_numbers(cells: Iterable[Any], targets: Sequence[float]) -> bool:
    try:
        return all(np.float32(cell_text(cell)) == target for cell, target in zip(cells, targets, strict=True))
    except ValueError:
        return False


def _renamed(cells: Iterable[str], targets: Iterable[str]) -> bool:
    """Return whether each label has one cell, and each cell one label."""
    cell_of: dict[str, str] = {}
    same = all(cell == cell_of.setdefault(label, cell) for cell, label in zip(cells, targets, strict=True))
    return same and len(set(cell_of.values())) == len(cell_of) > 1


# --- splits -----------------------------------------------------------------------------------------------------------

MAX_GROUPED_ROWS = 200_000
"""Above this, rows are drawn singly: grouping is a Python loop, about 1 s for each 200,000 rows."""

_SCORE_BINS = 10


def draw_split(
    part: Part, *, val_fraction: float, seed: int, task: Task, text_columns: Sequence[str] = ()
) -> tuple[Ints, Ints, int]:
    """Return row numbers (train, validation), ascending. Labels with two or more rows are in both splits. With `text_columns`,
    rows that share a sentence stay in one split if possible; the last number counts the validation rows that don't.
    """
    if not 0.0 < val_fraction < 1.0:
        problem = f"--validation_split_fraction {val_fraction} is not between 0 and 1"
        raise ConfigError(problem, fix="Set a fraction such as 0.1, or 0 to train without validation.")
    strata = strata_of(part, task)
    quota = _quota(strata, val_fraction)
    if quota.sum() == 0:
        fix = "Set --validation_file, or --validation_split_fraction 0 to train without one."
        raise DataError(f"{len(part)} rows are too few to set a validation split aside: no label has two rows", fix=fix)
    groups = _groups(part, text_columns)
    held_out = np.sort(_draw(strata, groups, quota, np.random.default_rng(seed)))
    train = np.setdiff1d(np.arange(len(part)), held_out)
    return train, held_out, 0 if groups is None else int(np.isin(groups[held_out], groups[train]).sum())


def draw_fold(part: Part, *, folds: int, fold: int, task: Task, text_columns: Sequence[str] = ()) -> tuple[Ints, Ints]:
    """Return (the other rows, the rows of fold `fold` of 1 to `folds`), ascending. Each row is always in the same fold.

    Labels are spread evenly; rows that share a sentence are in one fold.
    """
    strata = strata_of(part, task)
    if len(part) < folds:
        raise DataError(f"{len(part)} rows cannot be split into {folds} folds", fix="Use fewer --folds.")
    groups = _groups(part, text_columns)
    order = np.random.default_rng(0).permutation(len(part))
    members = _members(order, np.arange(len(part)) if groups is None else groups)
    counts = np.zeros((folds, int(strata.max()) + 1), dtype=np.int64)
    home = np.empty(len(part), dtype=np.int64)
    for rows in sorted(members, key=len, reverse=True):
        need = np.bincount(strata[rows], minlength=counts.shape[1])
        filled = counts @ need
        best = int(np.lexsort((counts.sum(axis=1), filled))[0])
        counts[best] += need
        home[rows] = best
    return np.flatnonzero(home != fold - 1), np.flatnonzero(home == fold - 1)


def strata_of(part: Part, task: Task) -> Ints:
    """Return the stratum of each row as a small number."""
    if task is Task.MULTILABEL:
        return np.zeros(len(part), dtype=np.int64)
    labels = part.labels().to_numpy(zero_copy_only=False)
    if task is Task.REGRESSION:
        bins = min(_SCORE_BINS, max(1, len(labels) // 20))
        edges = np.quantile(labels, np.linspace(0, 1, bins + 1)[1:-1])
        return np.asarray(np.searchsorted(edges, labels), dtype=np.int64)
    classes: Ints = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    return classes


def _quota(strata: Ints, fraction: float) -> Ints:
    """Return the rows to hold out of each stratum: the rounded share, at least one of two, never all.

    If one row of each of many small classes would be more than twice the fraction, the largest classes have one.
    """
    sizes = np.bincount(strata)
    wanted = np.floor(sizes * fraction + 0.5).astype(np.int64)
    quota: Ints = np.where(sizes >= 2, np.clip(wanted, 1, sizes - 1), 0)
    if quota.sum() > max(2 * fraction * len(strata), 20):
        quota = np.minimum(_share_out(np.where(sizes >= 2, sizes, 0), round(fraction * len(strata))), sizes)
    return quota


def _groups(part: Part, text: Sequence[str]) -> Ints | None:
    """Return the group of each row: rows that share a sentence, also indirectly. None if each row is a separate group."""
    if not text or len(part) > MAX_GROUPED_ROWS:
        return None
    numbers = _number_sentences(part, text)
    same = numbers[:, 0]
    if numbers.shape[1] == 2:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        size = int(numbers.max()) + 1
        links = coo_matrix((np.ones(len(numbers)), (numbers[:, 0], numbers[:, 1])), shape=(size, size))
        same = connected_components(links, directed=False)[1][same]
    groups: Ints = np.unique(same, return_inverse=True)[1].astype(np.int64)
    return None if groups.max() + 1 == len(groups) else groups


def _number_sentences(part: Part, text: Sequence[str]) -> Ints:
    """Return (rows, texts): equal numbers for sentences that are equal after normalizing case and spaces."""
    import pyarrow as pa

    cells = [fold_cells(table.column(name).combine_chunks()) for name in text for table in part.scan([name])]
    codes = pa.chunked_array(cells, pa.large_string()).combine_chunks().dictionary_encode().indices
    numbers: Ints = codes.to_numpy(zero_copy_only=False).reshape(len(text), len(part)).T
    return numbers


def fold_cells(cells: Any) -> Any:
    """Return `" ".join(text.lower().split())` for a whole column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.utf8_lower(cells)))
    return pc.binary_join(words, pa.scalar(" ", words.type.value_type)).cast(pa.large_string())


def _members(order: Ints, groups: Ints) -> list[list[int]]:
    """Return the rows of each group, keeping the order."""
    members: dict[int, list[int]] = {}
    for row in order.tolist():
        members.setdefault(int(groups[row]), []).append(row)
    return list(members.values())


def _draw(strata: Ints, groups: Ints | None, quota: Ints, rng: np.random.Generator) -> list[int]:
    """Return the row numbers of the validation split."""
    left = quota.copy()
    order = rng.permutation(len(strata))
    if groups is None:
        return _draw_rows(order, strata, left)
    chosen: list[int] = []
    for rows in _members(order, groups):
        need = np.bincount(strata[rows], minlength=len(left))
        if (need <= left).all():
            left -= need
            chosen.extend(rows)
        if not left.any():
            break
    # Most rows of a label are in groups larger than its share: draw single rows instead.
    return chosen + _draw_rows(order[~np.isin(order, chosen)], strata, left * (2 * left > quota))


def _draw_rows(order: Ints, strata: Ints, left: Ints) -> list[int]:
    chosen: list[int] = []
    for stratum in np.flatnonzero(left):
        rows = order[strata[order] == stratum]
        chosen.extend(rows[: left[stratum]].tolist())
    return chosen


def sample_part(part: Part, count: int | None, *, task: Task, seed: int) -> Part:
    """Return the part with `count` rows, in file order. Every label keeps its share and, if possible, at least one row."""
    if count is None or count >= len(part):
        return part
    strata = strata_of(part, task)
    quota = _share_out(np.bincount(strata), count)
    rows = np.sort(_draw_rows(np.random.default_rng(seed).permutation(len(part)), strata, quota))
    return replace(part, rows=rows if part.rows is None else part.rows[rows])


def _share_out(sizes: Ints, count: int) -> Ints:
    """Return integers that sum to `count`: rounded-down shares, at least one each if possible, then the largest remainders."""
    exact = sizes * (count / sizes.sum())
    quota: Ints = np.floor(exact).astype(np.int64)
    if count >= (sizes > 0).sum():
        quota = np.where((quota == 0) & (sizes > 0), 1, quota)
    while quota.sum() > count:
        quota[np.argmax(quota - exact + (quota > 1) * 1e-9 - (quota <= 1) * 1e9)] -= 1
    for k in np.argsort(quota - exact, kind="stable"):
        if quota.sum() == count:
            break
        quota[k] += int(quota[k] < sizes[k])
    return quota
