"""Labels as numbers: the column "labels" in every split, from one list of names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.errors import DataError, first_few
from tunesmith.labels import UNLABELLED, LabelMap, Task, match_names
from tunesmith.reading.columns import Columns, has_label, label_parts
from tunesmith.reading.label_names import Naming, check_split, choose_names, put_positive_last
from tunesmith.reading.label_survey import (
    NUMBER,
    class_names,
    is_list_type,
    is_string_type,
    label_batches,
    label_cells,
    plain_numbers,
    style_of_numbers,
    survey_labels,
)
from tunesmith.reading.multilabel import as_arrow, encode_lists, holds_places, join_switches, read_places, split_cells
from tunesmith.reading.source import Part, Source
from tunesmith.run.environment import library_bars_off

if TYPE_CHECKING:
    from datasets import Dataset

ENCODED = "labels"


def unfold_labels(sources: Mapping[str, Source], columns: Columns, separator: str | None) -> dict[str, Source]:
    """Sources in which the labels of a multilabel task are lists, whatever form they have in the files."""
    label = columns.label
    if columns.task is not Task.MULTILABEL or label is None:
        return dict(sources)
    train = sources.get("train") or next(iter(sources.values()))
    if label_parts(train, label):
        return {k: join_switches(s, label_parts(s, label)) if has_label(s, label) else s for k, s in sources.items()}
    if is_list_type(train.type_of(label)):
        return dict(sources)
    return {k: split_cells(s, label, separator, train) if label in s.column_names else s for k, s in sources.items()}


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
    column = columns.label
    if column is None or not any(column in source.column_names for source in sources.values()):
        missing = "label column" if column is None else f"column {column!r}"
        raise DataError(f"there is no {missing}", fix="Name it with --label_column_name.")
    if ENCODED in columns.text:
        raise DataError(f"a text column is named {ENCODED!r}, as the labels are inside", fix="Rename it in the data.")
    if columns.task is Task.REGRESSION:
        scores = {split: _scores(s, column, is_test=split.startswith("test")) for split, s in sources.items()}
        return LabelMap((column,), Task.REGRESSION), _with_labels(sources, scores)
    labelled = {split: source for split, source in sources.items() if column in source.column_names}
    surveys = {split: survey_labels(source, column) for split, source in labelled.items()}
    first = "train" if "train" in labelled else next(iter(labelled))
    train, multilabel = labelled[first], columns.task is Task.MULTILABEL
    if multilabel and (surveys[first].is_float or holds_places(train, column)):
        return _encode_places(sources, column, label_names)
    naming = choose_names(train, column, surveys[first], label_names, columns.default_names, head_names)
    if not multilabel:
        own = naming.names != columns.default_names and match_names(head_names, naming.names) is None
        free = own and label_names is None and class_names(train, column) is None
        naming = put_positive_last(naming, surveys[first].counts, positive_label, free=free)
    for split, source in labelled.items():
        unlabelled = split.startswith("test") and not multilabel
        check_split(source, column, surveys[split], naming, unlabelled_allowed=unlabelled, is_train=split == first)
    if multilabel:
        lists = {split: encode_lists(source, column, naming.values) for split, source in sources.items()}
        return LabelMap(naming.names, Task.MULTILABEL), _with_labels(sources, lists)
    present = surveys[first].counts.keys() & set(naming.values)
    if len(present) == 1 and not allow_single_label:
        problem = f"all {surveys[first].rows:,} rows have the one label {min(present)!r}: there is nothing to learn"
        fix = "Add rows with another label, or give --allow_single_label."
        raise DataError(problem, where=train.where(0, column), fix=fix)
    ids = {split: _ids(source, column, naming) for split, source in sources.items()}
    return LabelMap.for_classes(naming.names), _with_labels(sources, ids)


def _ids(source: Source, column: str, naming: Naming) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, UNLABELLED, dtype=np.int64))
    values = pa.array(naming.values, pa.string())
    found = [pc.index_in(batch.names, value_set=values) for batch in label_batches(source, column)]
    return pc.fill_null(pa.chunked_array(found).combine_chunks(), UNLABELLED).cast(pa.int64())


def _encode_places(
    sources: Mapping[str, Source], column: str, label_names: Sequence[str] | None
) -> tuple[LabelMap, dict[str, Dataset]]:
    """Lists of 0.0 and 1.0, all of one length: already a place for each label."""
    width = len(label_names) if label_names is not None else None
    places: dict[str, Any] = {}
    for split, source in sources.items():
        if column in source.column_names:
            places[split] = read_places(source, column, width)
            width = places[split].shape[1]
    empty = {split: np.full((s.dataset.num_rows, width or 0), np.nan) for split, s in sources.items()}
    names = tuple(label_names) if label_names is not None else tuple(str(i) for i in range(width or 0))
    columns = {split: as_arrow(rows) for split, rows in (empty | places).items()}
    return LabelMap(names, Task.MULTILABEL), _with_labels(sources, columns)


def _scores(source: Source, column: str, *, is_test: bool) -> Any:
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


def _with_labels(sources: Mapping[str, Source], labels: Mapping[str, Any]) -> dict[str, Dataset]:
    """The rows of each source with the column "labels", in place of any column of that name."""
    import datasets

    encoded = {}
    for split, source in sources.items():
        dataset = source.dataset
        if ENCODED in dataset.column_names:
            dataset = dataset.remove_columns(ENCODED)
        digest = hashlib.sha256(dataset._fingerprint.encode())
        for buffer in filter(None, labels[split].buffers()):
            digest.update(buffer)
        with library_bars_off(datasets):  # selected rows are copied first
            # A given fingerprint keeps `datasets` from hashing (by pickling) the whole column.
            encoded[split] = dataset.add_column(ENCODED, labels[split], new_fingerprint=digest.hexdigest()[:16])
    return encoded


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
            shown = first_few(list(map(repr, missing)), 8)
            notes.append(f"No {split} row has the label {shown}: {split} scores do not measure it.")
    return notes
