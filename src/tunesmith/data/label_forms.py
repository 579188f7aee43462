"""Labels that are not one name a row: numbers to predict, and several labels in a row. These stand in one cell with a separator
between, in a list, as a 0 or 1 for each label, or in one 0/1 column a label; whatever the form, they become lists of names, and
then one row of 0.0 and 1.0 for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunesmith.data.column_choice import OFF, ON
from tunesmith.data.columns import has_label, label_parts
from tunesmith.data.label_survey import (
    NUMBER,
    class_names,
    find_separator,
    is_list_type,
    is_string_type,
    label_batches,
    label_cells,
    plain_numbers,
    split_cell,
    style_of_numbers,
    survey_labels,
)
from tunesmith.data.source import Source
from tunesmith.errors import DataError
from tunesmith.labels import UNLABELLED


def read_scores(source: Source, column: str, *, is_test: bool) -> Any:
    """The scores as an Arrow column; nan for a test split without any."""
    import pyarrow as pa

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, np.nan, dtype=np.float32))
    style = style_of_numbers(source, column)
    parts = [_numbers(label_cells(t.column(column)), source, column, at, style) for at, t in source.scan([column])]
    scores = np.concatenate(parts)
    if is_test and (scores == UNLABELLED).all():
        scores = np.full_like(scores, np.nan)
    return pa.array(scores.astype(np.float32))


def _numbers(cells: Any, source: Source, column: str, start: int, style: str | None) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_string_type(cells.type):
        cells = plain_numbers(cells, style)
        good = pc.match_substring_regex(cells, NUMBER)
    elif pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type):
        good = pc.is_finite(cells)
    else:
        raise DataError(f"column {column!r} holds {cells.type}, expected numbers", where=source.origin)
    good = pc.fill_null(good, False)
    if not pc.all(good).as_py():
        at = pc.index(good, False).as_py()
        value = cells[at].as_py()
        problem = "the score is missing" if value in (None, "") else f"{value!r} is not a number"
        fix = "Regression needs a finite number in every row."
        raise DataError(problem, where=source.where(start + at, column), fix=fix)
    numbers = cells.cast(pa.float64()).to_numpy(zero_copy_only=False)
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if too_large.any():
        at = int(np.argmax(too_large))
        raise DataError(f"{cells[at].as_py()} is too large", where=source.where(start + at, column))
    return numbers


SEPARATOR_WORDS = {"comma": ",", "slash": "/", "pipe": "|", "semicolon": ";", "space": " ", "tab": "\t"}


def unfold_labels(sources: Mapping[str, Source], label: str, separator: str | None) -> dict[str, Source]:
    """Sources in which the labels are lists, whatever form they have in the files."""
    train = sources.get("train") or next(iter(sources.values()))
    if label_parts(train, label):
        return {k: _join_switches(s, label_parts(s, label)) if has_label(s, label) else s for k, s in sources.items()}
    if is_list_type(train.type_of(label)):
        return dict(sources)
    known = SEPARATOR_WORDS.get(separator or "", separator) or find_separator(survey_labels(train, label).counts) or "|"
    return {k: _split_cells(s, label, known) if label in s.column_names else s for k, s in sources.items()}


def _split_cells(source: Source, column: str, separator: str) -> Source:
    """The source with lists of labels in the column."""
    lists = []
    for row, cell in enumerate(source.dataset.with_format(None)[column]):
        try:
            lists.append(split_cell(cell, separator))
        except ValueError as error:
            raise DataError(str(error), where=source.where(row, column), fix='Write ["a", "b"].') from None
    return _with_lists(source, column, lists)


def _join_switches(source: Source, columns: Sequence[str]) -> Source:
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
        return _as_arrow(np.full((source.dataset.num_rows, len(values)), np.nan))
    hot = np.zeros((source.dataset.num_rows, len(values)), dtype=np.float32)
    start = 0
    for batch in label_batches(source, column):
        if batch.column.null_count:
            row = start + pc.index(pc.is_null(batch.column), True).as_py()
            raise DataError("the list of labels is missing", where=source.where(row, column), fix="Use [] for none.")
        start += len(batch.column)
        ids = pc.index_in(batch.names, value_set=pa.array(values, pa.string())).to_numpy(zero_copy_only=False)
        hot[batch.rows, ids.astype(np.int64)] = 1.0
    return _as_arrow(hot)


def encode_places(
    sources: Mapping[str, Source], column: str, label_names: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Lists of 0 and 1, all of one length, already have a place for each label: the names of these, and Arrow columns."""
    width = len(label_names) if label_names is not None else None
    places: dict[str, Any] = {}
    for split, source in sources.items():
        if column in source.column_names:
            places[split] = _read_places(source, column, width)
            width = places[split].shape[1]
    empty = {split: np.full((s.dataset.num_rows, width or 0), np.nan) for split, s in sources.items()}
    names = tuple(label_names) if label_names is not None else tuple(str(i) for i in range(width or 0))
    return names, {split: _as_arrow(rows) for split, rows in (empty | places).items()}


def _read_places(source: Source, column: str, width: int | None) -> Any:
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


def _as_arrow(rows: np.ndarray[Any, Any]) -> Any:
    """An Arrow column of lists of float32, from (rows, values)."""
    import pyarrow as pa

    offsets = np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(rows.reshape(-1), dtype=np.float32)))
