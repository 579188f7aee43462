"""Labels as numbers: the column "labels" in every split, from one LabelMap, by name; lists for a multilabel task whatever the
file holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.labels import UNLABELLED, LabelMap, Task, match_names
from tunesmith.reading.column_profile import SEPARATOR_WORDS, find_separator, join_switches, unfold_cells
from tunesmith.reading.columns import Columns, has_label, label_parts
from tunesmith.reading.label_names import Naming, check_enough, check_split, choose_names, put_positive_last
from tunesmith.reading.label_survey import (
    NUMBER,
    as_names,
    class_names,
    flatten_lists,
    holds_places,
    is_list_type,
    label_cells,
    plain_numbers,
    style_of_numbers,
    survey_labels,
)
from tunesmith.reading.source import Part, Source
from tunesmith.run.environment import library_bars_off

if TYPE_CHECKING:
    from datasets import Dataset

ENCODED = "labels"


def encode_labels(
    sources: Mapping[str, Source],
    columns: Columns,
    *,
    label_names: Sequence[str] | None = None,
    head_names: Sequence[str] = (),
    allow_single_label: bool = False,
    positive_label: str | None = None,
) -> tuple[LabelMap, dict[str, Dataset]]:
    """The map and the splits with "labels": int64 (-1 unlabelled), float32 (nan unlabelled) or list of float32.

    A split whose name starts with "test" may be unlabelled: without the column, or with -1.
    """
    if columns.label is None:
        raise DataError("there is no label column", fix="Name it with --label_column_name.")
    if ENCODED in columns.text:
        raise DataError(f"a text column is named {ENCODED!r}, as the labels are inside", fix="Rename it in the data.")
    if columns.task is Task.REGRESSION:
        return _encode_scores(sources, columns.label)
    labelled = {split: s for split, s in sources.items() if columns.label in s.column_names}
    surveys = {split: survey_labels(source, columns.label) for split, source in labelled.items()}
    if not labelled:
        raise DataError(f"there is no column {columns.label!r}", fix="Name it with --label_column_name.")
    first = "train" if "train" in labelled else next(iter(labelled))
    train = labelled[first]
    multilabel = columns.task is Task.MULTILABEL
    if multilabel and (surveys[first].is_float or holds_places(train, columns.label)):
        return _encode_hot(sources, columns.label, label_names)
    naming = choose_names(train, columns.label, surveys[first], label_names, columns.default_names, head_names)
    if not multilabel:
        own = naming.names != columns.default_names and match_names(head_names, naming.names) is None
        free = own and label_names is None and class_names(train, columns.label) is None
        naming = put_positive_last(naming, surveys[first].counts, positive_label, free=free)
    for split, source in labelled.items():
        test = split.startswith("test") and not multilabel
        is_train = split == first
        check_split(source, columns.label, surveys[split], naming, unlabelled_allowed=test, is_train=is_train)
    if not multilabel:
        check_enough(train, columns.label, surveys[first], naming, allow_single_label=allow_single_label)
    labels = LabelMap(naming.names, Task.MULTILABEL) if multilabel else LabelMap.for_classes(naming.names)
    encode = _hot_rows if multilabel else _ids
    return labels, {split: _with_labels(s, encode(s, columns.label, naming)) for split, s in sources.items()}


def _ids(source: Source, column: str, naming: Naming) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, UNLABELLED, dtype=np.int64))
    values = pa.array(naming.values, pa.string())
    names = class_names(source, column)
    parts = []
    for start, table in source.scan([column]):
        cells = as_names(label_cells(table.column(column)), names, source=source, column=column, start=start)
        parts.append(pc.fill_null(pc.index_in(cells, value_set=values), UNLABELLED).cast(pa.int64()))
    return pa.chunked_array(parts, pa.int64()).combine_chunks()


def _hot_rows(source: Source, column: str, naming: Naming) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    width = len(naming.names)
    if column not in source.column_names:
        return _lists(np.full((source.dataset.num_rows, width), np.nan, dtype=np.float32))
    values = pa.array(naming.values, pa.string())
    names = class_names(source, column)
    hot = np.zeros((source.dataset.num_rows, width), dtype=np.float32)
    for start, table in source.scan([column]):
        lists = table.column(column).combine_chunks()
        if lists.null_count:
            row = start + pc.index(pc.is_null(lists), True).as_py()
            raise DataError("the list of labels is missing", where=source.where(row, column), fix="Use [] for none.")
        items, parents = flatten_lists(lists)
        cells = as_names(items, names, source=source, column=column, start=start, parents=parents)
        ids = pc.index_in(cells, value_set=values).to_numpy(zero_copy_only=False)
        hot[start + parents.astype(np.int64), ids.astype(np.int64)] = 1.0
    return _lists(hot)


def _encode_hot(
    sources: Mapping[str, Source], column: str, label_names: Sequence[str] | None
) -> tuple[LabelMap, dict[str, Dataset]]:
    """Lists of 0.0 and 1.0, all of one length: already a place for each label."""
    import pyarrow.compute as pc

    width: int | None = len(label_names) if label_names is not None else None
    splits: dict[str, Any] = {}
    for split, source in sources.items():
        parts = []
        for start, table in source.scan([column]) if column in source.column_names else ():
            lists = table.column(column).combine_chunks()
            lengths = pc.fill_null(pc.list_value_length(lists), -1).to_numpy(zero_copy_only=False)
            width = int(lengths[0]) if width is None else width
            rows = _places(pc.list_flatten(lists))
            if not (lengths == width).all():
                row = start + int(np.argmax(lengths != width))
                problem = f"{lengths[row - start]} values, expected {width}"
                raise DataError(problem, where=source.where(row, column), fix="Give 0 or 1 for every label.")
            if not np.isin(rows, (0.0, 1.0)).all():
                at = int(np.argmax(~np.isin(rows, (0.0, 1.0))))
                problem = f"{rows[at]} is neither 0 nor 1"
                raise DataError(problem, where=source.where(start + at // width, column))
            parts.append(rows.astype(np.float32).reshape(-1, width))
        splits[split] = np.concatenate(parts) if parts else None
    count = width or 0
    names = tuple(label_names) if label_names is not None else tuple(str(i) for i in range(count))
    datasets = {}
    for split, source in sources.items():
        hot = splits[split]
        rows = np.full((source.dataset.num_rows, count), np.nan, dtype=np.float32) if hot is None else hot
        datasets[split] = _with_labels(source, _lists(rows))
    return LabelMap(names, Task.MULTILABEL), datasets


def _places(cells: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_string(cells.type) or pa.types.is_boolean(cells.type):
        return np.asarray([str(cell).lower() in ("1", "true") for cell in cells.to_pylist()], dtype=np.float32)
    return cells.to_numpy(zero_copy_only=False)


def _encode_scores(sources: Mapping[str, Source], column: str) -> tuple[LabelMap, dict[str, Dataset]]:
    datasets = {}
    for split, source in sources.items():
        scores = _scores(source, column, unlabelled_allowed=split.startswith("test"))
        datasets[split] = _with_labels(source, scores)
    return LabelMap((column,), Task.REGRESSION), datasets


def _scores(source: Source, column: str, *, unlabelled_allowed: bool) -> Any:
    import pyarrow as pa

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, np.nan, dtype=np.float32))
    style = style_of_numbers(source, column)
    parts = [_numbers(table.column(column), source, column, start, style) for start, table in source.scan([column])]
    scores = np.concatenate(parts)
    if unlabelled_allowed and (scores == UNLABELLED).all():
        scores = np.full_like(scores, np.nan)
    return pa.array(scores.astype(np.float32))


def _numbers(cells: Any, source: Source, column: str, start: int, style: str | None) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = label_cells(cells)
    kind = cells.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        cells = plain_numbers(cells, style)
        good = pc.match_substring_regex(cells, NUMBER)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        good = pc.is_finite(cells)
    else:
        raise DataError(f"column {column!r} holds {kind}, expected numbers", where=source.origin)
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


def _lists(rows: np.ndarray[Any, Any]) -> Any:
    import pyarrow as pa

    offsets = np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))


def _with_labels(source: Source, labels: Any) -> Dataset:
    """The source's rows with the column "labels", in place of any column of that name."""
    dataset = source.dataset
    if ENCODED in dataset.column_names:
        dataset = dataset.remove_columns(ENCODED)
    digest = hashlib.sha256(dataset._fingerprint.encode())
    for buffer in labels.buffers():
        if buffer is not None:
            digest.update(buffer)
    import datasets

    with library_bars_off(datasets):  # selected rows are copied first
        # A given fingerprint keeps `datasets` from hashing (by pickling) the whole column.
        return dataset.add_column(ENCODED, labels, new_fingerprint=digest.hexdigest()[:16])


def unfold_labels(sources: Mapping[str, Source], columns: Columns, separator: str | None) -> dict[str, Source]:
    """Sources in which the labels of a multilabel task are lists, whatever form they have in the files."""
    if columns.task is not Task.MULTILABEL or columns.label is None:
        return dict(sources)
    label = columns.label
    train = sources.get("train") or next(iter(sources.values()))
    if label_parts(train, label):
        return {k: join_switches(s, label_parts(s, label)) if has_label(s, label) else s for k, s in sources.items()}
    if is_list_type(train.dataset.features.arrow_schema.field(label).type):
        return dict(sources)
    found = SEPARATOR_WORDS.get(separator or "", separator) or find_separator(survey_labels(train, label).counts) or "|"
    return {k: unfold_cells(s, label, found) if label in s.column_names else s for k, s in sources.items()}


def notes_on_classes(parts: Mapping[str, Part], labels: LabelMap) -> list[str]:
    """Which class F1 is about, and each evaluated split without a row of some class: no score tells how well it is found."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    one = f"F1, precision and recall are those of the class {labels.positive_name!r}; --positive_label names another."
    notes = [one] if labels.positive_name is not None else []
    for split, part in parts.items():
        ids = np.asarray(part.labels())
        missing = [name for i, name in enumerate(labels.names) if not (ids == i).any()]
        if split.startswith(("validation", "test")) and missing and (ids >= 0).any():
            shown = ", ".join(map(repr, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            notes.append(f"No {split} row has the label {shown}: {split} scores do not measure it.")
    return notes
