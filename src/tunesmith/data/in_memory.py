"""Rows that are already in memory, in the forms that Python users have: lists, arrays, dicts, DataFrames, Datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.arrow_files import plain_batches
from tunesmith.data.source import Source, checked
from tunesmith.errors import DataError, short_text

if TYPE_CHECKING:
    from datasets import Dataset

TEXT, PAIR, LABEL = "text", "text_pair", "label"
"""The names of columns that come without names."""
EXPECTED = "a list of texts, a list of pairs, a Series, an array, or a DataFrame with one or two text columns"


def holds_splits(data: Mapping[str, Any]) -> bool:
    """Whether a mapping holds one table for each split, as a DatasetDict does, and not one list for each column."""
    return all(_is_table(value) for value in data.values()) and bool(data)


def _is_table(value: Any) -> bool:
    rows_of_dicts = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return hasattr(value, "column_names") or hasattr(value, "columns") or isinstance(value, Mapping) or rows_of_dicts


def text_columns_of(texts: Any) -> dict[str, list[str]]:
    """One column of texts or two, by name. A single text, numbers and missing values are refused with what was expected."""
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"one text was given, expected {EXPECTED}: put it into a list")
    if texts is None or hasattr(texts, "tocsr") or not (hasattr(texts, "__len__") or hasattr(texts, "__iter__")):
        raise TypeError(f"{type(texts).__name__} was given, expected {EXPECTED}")
    if hasattr(texts, "columns") and hasattr(texts, "to_dict"):
        names = [str(name) for name in texts.columns]
        columns = [_plain_list(texts[name]) for name in texts.columns]
    elif isinstance(texts, Mapping):
        names = [str(name) for name in texts]
        columns = [_plain_list(values) for values in texts.values()]
    else:
        columns = _unnamed(texts)
        names = [TEXT, PAIR][: len(columns)]
    if not 1 <= len(columns) <= 2:
        raise ValueError(f"{len(columns)} columns ({', '.join(names[:6])}) were given, expected {EXPECTED}")
    for name, values in zip(names, columns, strict=True):
        _require_texts(name, values)
    return dict(zip(names, columns, strict=True))


def column_equal_to(columns: Mapping[str, Sequence[Any]], labels: Sequence[Any]) -> str | None:
    """Return the name of a text column whose cells are the labels, or None."""
    target = [str(value) for value in labels]
    return next((name for name, cells in columns.items() if len(target) > 1 and list(map(str, cells)) == target), None)


def refuse_labels_as_text(columns: Mapping[str, Sequence[Any]], labels: Sequence[Any]) -> None:
    """Refuse a text column that equals the labels: the model would read the answer."""
    name = column_equal_to(columns, labels)
    if name is not None:
        raise DataError(
            f"the text column {name!r} equals the labels", fix=f"Pass the texts without the column {name!r}."
        )


def labelled_table(texts: Any, labels: Any) -> Any:
    """Return a table with the text columns and the column "label", for `read_source`."""
    columns: dict[str, Any] = dict(text_columns_of(texts))
    values = _plain_list(labels)
    rows = len(next(iter(columns.values())))
    if len(values) != rows:
        raise DataError(f"{rows:,} texts and {len(values):,} labels", fix="Give one label for each text.")
    refuse_labels_as_text(columns, values)
    name = LABEL if LABEL not in columns else "the_label"
    return columns_table({**columns, name: values})


def columns_table(columns: Mapping[str, Any]) -> Any:
    """A dict of lists (or Series, or arrays), all of one length, as a Dataset."""
    import pyarrow as pa
    from datasets import Dataset

    plain = {str(name): _plain_list(values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in plain.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"columns of different lengths: {', '.join(f'{n} {k:,}' for n, k in lengths.items())}")
    try:
        return Dataset(pa.table({name: pa.array(values, from_pandas=True) for name, values in plain.items()}))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(f"a column mixes kinds of values ({error})", fix="Give one kind a column.") from None


def array_table(array: Any) -> Any:
    """A two-dimensional array or a list of rows as a Dataset with columns column_1, column_2 and so on."""
    values = np.asarray(array, dtype=object)
    if values.ndim != 2:
        raise DataError(f"an array of {values.ndim} dimensions holds no rows", fix="Give a table, or texts and labels.")
    return columns_table({f"column_{k}": values[:, k - 1] for k in range(1, values.shape[1] + 1)})


def _unnamed(texts: Any) -> list[list[Any]]:
    shape = getattr(texts, "shape", None)
    if shape is not None and len(shape) == 2:
        array = np.asarray(texts)
        return [array[:, k].tolist() for k in range(array.shape[1])]
    values = _plain_list(texts)
    pairs = [v for v in values if isinstance(v, (list, tuple, np.ndarray))]
    if not pairs:
        return [values]
    if len(pairs) != len(values) or any(len(p) != len(pairs[0]) for p in pairs):
        raise ValueError(f"single texts and pairs are mixed, expected {EXPECTED}")
    return [list(column) for column in zip(*pairs, strict=True)]


def _plain_list(values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise DataError(f"a column is {type(values).__name__}, expected a list of values")
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return found if isinstance(found, list) else [found]


def _require_texts(name: str, values: Sequence[Any]) -> None:
    for at, value in enumerate(values):
        if not isinstance(value, str):
            kind = "a missing value" if value is None or value != value else f"{type(value).__name__} ({value!r:.40})"
            error = ValueError if value is None or value != value else TypeError
            raise error(f"row {at} of {name!r} holds {kind}, expected text: {EXPECTED}")


def read_memory(source: Any, name: str) -> Source:
    """The rows of a Dataset, DataFrame, dict of lists, list of dicts or array of rows."""
    import datasets

    if isinstance(source, datasets.DatasetDict):
        if name not in source:
            raise DataError(f"the DatasetDict holds {', '.join(source)}, none is {name!r}", where=name)
        source = source[name]
    if isinstance(source, datasets.Dataset):
        return checked(Source(name, source, name))
    if isinstance(source, list | tuple) and (not source or isinstance(source[0], dict)):
        return _from_list(source, name)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return checked(Source(name, _from_frame(source, name), name))
    if isinstance(source, Mapping):
        return checked(Source(name, columns_table(source), name))
    if isinstance(source, list | tuple) or getattr(source, "ndim", 0) == 2:
        return checked(Source(name, array_table(source), name))
    fix = "Give a path, a Dataset, a DataFrame, a dict of lists, a list of dicts or an array of rows."
    raise DataError(f"rows cannot be read from {type(source).__name__}", where=name, fix=fix)


def _from_frame(frame: Any, name: str) -> Dataset:
    import pyarrow as pa
    from datasets import Dataset

    if not hasattr(frame, "to_arrow") and not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"the DataFrame has the column {twice!r} twice", fix="Rename one of them.")
    try:
        polars = hasattr(frame, "to_arrow")
        table = frame.to_arrow() if polars else pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata(None).combine_chunks()
        return Dataset(pa.Table.from_batches(plain_batches(table.to_batches(), name)) if len(frame) else table)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        fix = "Give one kind of value a column: text, numbers, true/false, dates or lists of these."
        raise DataError(f"the DataFrame cannot be read ({short_text(error)})", where=name, fix=fix) from None


def _from_list(rows: Any, name: str) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    from tunesmith.data.json_files import ColumnKinds, convert_export

    if not rows:
        raise DataError("the list is empty", where=name, fix="It needs at least one row.")
    for i, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{type(row).__name__}, expected a dict", where=f"{name}:{i}")
    _, records = convert_export(enumerate(rows, start=1))
    batch = ColumnKinds(name, lines=False).batch([row for _, row in records], range(1, len(rows) + 1))
    return Source(name, Dataset(pa.Table.from_batches([batch])), name)
