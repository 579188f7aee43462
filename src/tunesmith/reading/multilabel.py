"""Rows with several labels: in one cell with a separator between, in a list, as a 0 or 1 for each label, or in one 0/1 column a
label. Whatever the form, they become lists of names, and then one row of 0.0 and 1.0 for each row.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.reading.column_choice import OFF, ON
from tunesmith.reading.label_survey import are_numbers, class_names, is_string_type, label_batches, survey_labels
from tunesmith.reading.source import Source

SEPARATORS = ("|", ";")
"""What sets labels apart without a doubt, once the parts are seen to repeat."""
DOUBTFUL_SEPARATORS = {",": "comma", "/": "slash", " ": "space"}
"""What is asked about: it may be part of a name."""
SEPARATOR_WORDS = {"comma": ",", "slash": "/", "pipe": "|", "semicolon": ";", "space": " ", "tab": "\t"}


def find_separator(counts: Mapping[str, int]) -> str | None:
    """What sets several labels of one cell apart: a character, "json" for lists written out, or None."""
    cells = [cell for cell in counts if cell]
    if cells and all(cell.strip().startswith("[") and cell.strip().endswith("]") for cell in cells):
        return "json"
    return next((sep for sep in (*SEPARATORS, *DOUBTFUL_SEPARATORS) if _sets_apart(sep, cells, counts)), None)


def _sets_apart(separator: str, cells: Sequence[str], counts: Mapping[str, int]) -> bool:
    """Whether the parts of cells are used again in other cells, as labels are."""
    several = [cell for cell in cells if separator in cell]
    if sum(counts[cell] for cell in several) < 2 or are_numbers(cells):
        return False
    uses = Counter(part for cell in cells for part in split_cell(cell, separator))
    again = sum(count > 1 for count in uses.values())
    short = all(len(part.split()) <= 4 for part in uses) and (separator != " " or all(p[0] == "#" for p in uses))
    return short and again >= len(uses) / 2 and len(uses) < len(cells) + len(several)


def split_cell(cell: str | None, separator: str) -> list[str]:
    """The labels of one cell, without the spaces around them."""
    if cell is None or not cell.strip():
        return []
    if separator != "json":
        return [part.strip() for part in cell.split(separator) if part.strip()]
    try:
        found = json.loads(cell)
    except ValueError:
        try:
            found = ast.literal_eval(cell)  # ['a', 'b'], as Python prints a list
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
    if not isinstance(found, list) or not all(isinstance(v, (str, int)) for v in found):
        raise ValueError(f"{cell[:60]!r} is not a list of labels")
    return [str(value) for value in found]


def split_cells(source: Source, column: str, separator: str | None, train: Source) -> Source:
    """The source with lists of labels in the column. Without a separator, it is found in the train rows."""
    found = (
        SEPARATOR_WORDS.get(separator or "", separator) or find_separator(survey_labels(train, column).counts) or "|"
    )
    lists = []
    for row, cell in enumerate(source.dataset.with_format(None)[column]):
        try:
            lists.append(split_cell(cell, found))
        except ValueError as error:
            raise DataError(str(error), where=source.where(row, column), fix='Write ["a", "b"].') from None
    return _with_lists(source, column, lists)


def join_switches(source: Source, columns: Sequence[str]) -> Source:
    """The source with one more column, named by the columns with commas: the names of those that hold 1, true or yes."""
    table = source.dataset.with_format(None)
    rows: list[list[str]] = [[] for _ in range(source.dataset.num_rows)]
    for name in columns:
        for row, value in enumerate(table[name]):
            word = str(value).strip().lower()
            if word in ON:
                rows[row].append(name)
            elif word not in OFF:
                raise DataError(f"{value!r} is neither 0 nor 1", where=source.where(row, name), fix="Write 0 or 1.")
    return _with_lists(source, ",".join(columns), rows)


def _with_lists(source: Source, column: str, lists: list[list[str]]) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    dataset = source.dataset.remove_columns([column]) if column in source.dataset.column_names else source.dataset
    table = dataset.with_format("arrow")[:]
    return source.with_rows(Dataset(table.append_column(column, pa.array(lists, pa.list_(pa.string())))))


def holds_places(source: Source, column: str) -> bool:
    """Whether a column of lists has a 0 or 1 for every label: lists of one length, some with one of the two twice."""
    import pyarrow as pa
    import pyarrow.compute as pc

    widths: set[int | None] = set()
    values: set[str] = set()
    twice = False
    for _, table in source.scan([column]):
        lists = table.column(column).combine_chunks()
        widths |= set(pc.unique(pc.list_value_length(lists)).to_pylist())
        found = pc.unique(pc.list_flatten(lists))
        floats = pa.types.is_floating(found.type)
        if len(widths) > 1 or len(found) > 3 or class_names(source, column) or floats:
            return False
        values |= {str(value).lower() for value in found.to_pylist()}
        if widths == {2} and not twice:
            twice = bool(pc.any(pc.equal(pc.list_element(lists, 0), pc.list_element(lists, 1))).as_py())
    wide = bool(widths - {None, 0, 1, 2})
    return values in ({"0", "1"}, {"false", "true"}) and (wide or twice)


def encode_lists(source: Source, column: str, values: Sequence[str]) -> Any:
    """Lists of names as an Arrow column with 0.0 or 1.0 for each of `values`; nan in all places for unlabelled rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in source.column_names:
        return as_arrow(np.full((source.dataset.num_rows, len(values)), np.nan))
    hot = np.zeros((source.dataset.num_rows, len(values)), dtype=np.float32)
    for batch in label_batches(source, column):
        if batch.column.null_count:
            row = batch.start + pc.index(pc.is_null(batch.column), True).as_py()
            raise DataError("the list of labels is missing", where=source.where(row, column), fix="Use [] for none.")
        ids = pc.index_in(batch.names, value_set=pa.array(values, pa.string())).to_numpy(zero_copy_only=False)
        hot[batch.start + batch.parents.astype(np.int64), ids.astype(np.int64)] = 1.0
    return as_arrow(hot)


def read_places(source: Source, column: str, width: int | None) -> Any:
    """(rows, labels) of a column of lists with a 0 or 1 for each label; `width` is the number of labels, where it is known."""
    import pyarrow.compute as pc

    parts = []
    for start, table in source.scan([column]):
        lists = table.column(column).combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), -1).to_numpy(zero_copy_only=False)
        width = int(lengths[0]) if width is None else width
        if not (lengths == width).all():
            row = int(np.argmax(lengths != width))
            problem = f"{lengths[row]} values, expected {width}"
            raise DataError(problem, where=source.where(start + row, column), fix="Give 0 or 1 for every label.")
        cells = _numbers_of(pc.list_flatten(lists))
        wrong = ~np.isin(cells, (0.0, 1.0))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(f"{cells[at]} is neither 0 nor 1", where=source.where(start + at // width, column))
        parts.append(cells.reshape(-1, width))
    return np.concatenate(parts)


def _numbers_of(cells: Any) -> Any:
    import pyarrow as pa

    if is_string_type(cells.type) or pa.types.is_boolean(cells.type):
        return np.asarray([str(cell).lower() in ("1", "true") for cell in cells.to_pylist()], dtype=np.float32)
    return cells.to_numpy(zero_copy_only=False)


def as_arrow(rows: np.ndarray[Any, Any]) -> Any:
    """An Arrow column of lists of float32, from (rows, values)."""
    import pyarrow as pa

    offsets = np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(rows.reshape(-1), dtype=np.float32)))
