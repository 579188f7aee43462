"""Labels as numbers: the column "labels" in every split, from one list of names, and the checks that make it safe to train on.

Names come from `label_names`, else from a ClassLabel, else from the values in train: whole numbers in numeric order, text in code
point order; a model with a trained head for the same names gives its order. Of two classes the second is the positive one, whose
F1, precision and recall are reported. A label that train does not have is refused. -1 means unlabeled and is allowed in test
only, unless `label_names` has it. Labels that differ only in case or spaces are one question.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.columns import OFF, ON, Columns, has_label, label_parts
from tunesmith.data.label_values import (
    NUMBER,
    Survey,
    alike,
    class_names,
    find_separator,
    fold_case,
    is_list_type,
    is_string_type,
    label_batches,
    label_cells,
    split_cell,
    survey_labels,
)
from tunesmith.data.source import Part, Source
from tunesmith.errors import ConfigError, DataError, did_you_mean, first_few
from tunesmith.files import BadFile, read_plain
from tunesmith.labels import UNLABELLED, LabelMap, Task, match_names
from tunesmith.runs.environment import library_bars_off

if TYPE_CHECKING:
    from datasets import Dataset


ENCODED = "labels"
SHOWN = 4
_UNLABELLED_NAME = str(UNLABELLED)
_SWITCHES = ({"0", "1"}, {"0.0", "1.0"}, {"false", "true"})
_TYPO_SHARE = 200


@dataclass(frozen=True, slots=True)
class Naming:
    """`names` in id order; `values` are what the data holds for each of them."""

    names: tuple[str, ...]
    values: tuple[str, ...]


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
        raise DataError(f"there is no {missing}", fix="Set --label_column_name.")
    if ENCODED in columns.text:
        raise DataError(f"a text column is named {ENCODED!r}, as the labels are inside", fix="Rename it in the data.")
    if columns.task is Task.REGRESSION:
        scores = {split: read_scores(s, column, is_test=split.startswith("test")) for split, s in sources.items()}
        if "train" in scores and not allow_single_label:
            _refuse_constant(sources["train"], column, scores["train"])
        return LabelMap((column,), Task.REGRESSION), _with_labels(sources, scores)
    labelled = {split: source for split, source in sources.items() if column in source.column_names}
    surveys = {split: survey_labels(source, column) for split, source in labelled.items()}
    first = "train" if "train" in labelled else next(iter(labelled))
    train, multilabel = labelled[first], columns.task is Task.MULTILABEL
    if multilabel:
        from tunesmith.data.label_values import holds_places

        if surveys[first].is_float or holds_places(train, column):
            names, places = encode_places(sources, column, label_names)
            return LabelMap(names, Task.MULTILABEL), _with_labels(sources, places)
    naming = _choose_names(train, column, surveys[first], label_names, columns.default_names, head_names)
    if not multilabel:
        own = naming.names != columns.default_names and match_names(head_names, naming.names) is None
        free = own and label_names is None and class_names(train, column) is None
        naming = _put_positive_last(naming, surveys[first].counts, positive_label, free=free)
    for split, source in labelled.items():
        unlabelled = split.startswith("test") and not multilabel
        _check_split(source, column, surveys[split], naming, unlabelled_allowed=unlabelled, is_train=split == first)
    if multilabel:
        lists = {split: encode_lists(source, column, naming.values) for split, source in sources.items()}
        return LabelMap(naming.names, Task.MULTILABEL), _with_labels(sources, lists)
    if not allow_single_label:
        _refuse_single_label(train, column, surveys[first], naming)
    ids = {split: _ids(source, column, naming) for split, source in sources.items()}
    return LabelMap.for_classes(naming.names), _with_labels(sources, ids)


def _refuse_single_label(train: Source, column: str, survey: Survey, naming: Naming) -> None:
    present = survey.counts.keys() & set(naming.values)
    if len(present) == 1:
        problem = f"all {survey.rows:,} rows have the one label {min(present)!r}: there is nothing to learn"
        fix = "Add rows with another label, or set --allow_single_label."
        raise DataError(problem, where=train.where(0, column), fix=fix)


def _ids(source: Source, column: str, naming: Naming) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, UNLABELLED, dtype=np.int64))
    values = pa.array(naming.values, pa.string())
    found = [pc.index_in(batch.names, value_set=values) for batch in label_batches(source, column)]
    return pc.fill_null(pa.chunked_array(found).combine_chunks(), UNLABELLED).cast(pa.int64())


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
    """Which class F1 refers to, and the evaluated splits that have no row of some class and so cannot measure it."""
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
        if split.startswith("test") and (ids < 0).any():
            notes.append(f"{int((ids < 0).sum()):,} of {len(part):,} {split} rows are unlabeled (-1).")
    return notes


def _choose_names(
    train: Source,
    column: str,
    survey: Survey,
    label_names: Sequence[str] | None,
    default_names: Sequence[str],
    head_names: Sequence[str],
) -> Naming:
    """The names and the values they stand for. `default_names` (GLUE's) apply to whole-number labels only.

    If neither names nor a ClassLabel are set and the names are those of the model's head, its order is used.
    """
    found = [name for name in survey.counts if name != _UNLABELLED_NAME or name in (label_names or ())]
    features = class_names(train, column)
    if label_names is not None:
        return _given_names(tuple(label_names), features or found, train, column)
    if features is not None:
        values = names = tuple(features)
    elif found and all(is_whole(name) for name in found):
        values = names = tuple(sorted(found, key=int))
        ids = tuple(str(i) for i in range(len(default_names)))
        if default_names and set(values) <= set(ids):
            names, values = tuple(default_names), ids
    else:
        _refuse_variants(train, column, survey)
        _refuse_typos(train, column, survey)
        values = names = tuple(sorted(found))
    order = (match_names(head_names, names) if head_names else None) or names
    value_of = dict(zip(names, values, strict=True))
    return Naming(order, tuple(value_of[name] for name in order))


def _given_names(names: tuple[str, ...], found: Sequence[str], train: Source, column: str) -> Naming:
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError(f"--label_names {', '.join(names)!r} has a name twice or an empty one")
    if set(found) & set(names) or not all(is_whole(name) for name in found):
        return Naming(names, names)
    ordered = tuple(sorted(found, key=int))
    if all(0 <= int(name) < len(names) for name in found):
        return Naming(names, tuple(str(i) for i in range(len(names))))
    if len(found) == len(names):
        return Naming(names, ordered)
    problem = f"--label_names gives {len(names)} names for the {len(found)} labels {', '.join(ordered[:8])}"
    raise DataError(problem, where=f"{train.origin}:{column}", fix="List one name per label, in id order.")


def is_whole(name: str) -> bool:
    """Whether a label is a whole number without leading zeros or a plus sign."""
    try:
        return str(int(name)) == name
    except ValueError:
        return False


def _put_positive_last(naming: Naming, counts: Mapping[str, int], asked: str | None, *, free: bool) -> Naming:
    """Two classes with the positive one second: `asked`, else 1 of 0 and 1, else the rarer one in train.

    Where the order is not `free` (label_names, a ClassLabel, a trained head, GLUE) it stays, and another wish is refused.
    """
    if asked is not None and asked not in naming.names:
        problem = f"--positive_label {asked!r} is not one of {', '.join(naming.names[:20])}"
        raise ConfigError(problem, fix=did_you_mean(asked, naming.names))
    if len(naming.names) != 2:
        if asked is not None:
            problem = f"--positive_label is about two classes, and there are {len(naming.names)}"
            raise ConfigError(problem, fix="Leave it out.")
        return naming
    positive = asked
    if positive is None and free and {name.lower() for name in naming.names} not in _SWITCHES:
        first, second = (counts.get(value, 0) for value in naming.values)
        positive = naming.names[0] if first < second else None
    if positive is None or positive == naming.names[1]:
        return naming
    if not free:
        fix = f"Set --label_names {naming.names[1]},{naming.names[0]} as well."
        raise ConfigError(f"--positive_label {asked!r} is label 0 here, and the order is fixed", fix=fix)
    return Naming(naming.names[::-1], naming.values[::-1])


def _check_split(
    source: Source, column: str, survey: Survey, naming: Naming, *, unlabelled_allowed: bool, is_train: bool
) -> None:
    """Refuses missing, unlabelled and unknown labels with their first row."""
    if survey.first_missing is not None:
        fix = "Fill it in; -1 marks an unlabeled test row."
        raise DataError("the label is missing", where=source.where(survey.first_missing, column), fix=fix)
    for value, row in survey.first_row.items():
        if value in naming.values:
            continue
        where = source.where(row, column)
        if value == _UNLABELLED_NAME:
            if unlabelled_allowed:
                continue
            fix = f"Remove such rows, or set --label_names={','.join((value, *naming.values[:20]))} if -1 is a class."
            raise DataError(f"-1 means unlabeled, which {source.name} rows cannot be", where=where, fix=fix)
        raise _unknown(value, naming, where, is_train=is_train)


def _unknown(value: str, naming: Naming, where: str, *, is_train: bool) -> DataError:
    shown = naming.values if len(naming.values) <= 20 else (*naming.values[:20], "...")
    same = next((v for v in naming.values if alike(v) == alike(value)), None)
    if same is not None:
        seen = fold_case(same) == fold_case(value)
        how = "case or spaces" if seen else "its Unicode form, invisible characters or the way a number is written"
        problem = f"{value!a} differs from {same!a} only in {how}"
        return DataError(problem, where=where, fix="Write both the same, or set --merge_label_variants.")
    of = "" if is_train else " (the labels in train)"
    problem = f"{value!r} is not one of {', '.join(shown)}{of}"
    fix = did_you_mean(value, naming.values) or "Correct it, or add such rows to train."
    return DataError(problem, where=where, fix=fix)


def _refuse_variants(train: Source, column: str, survey: Survey) -> None:
    """Refuses labels that differ only in case or spaces, all of them at once, with the two ways out."""
    by_fold: dict[str, list[str]] = {}
    for name in sorted(survey.counts, key=lambda n: -survey.counts[n]):
        by_fold.setdefault(fold_case(name), []).append(name)
    pairs = [(group[0], other) for group in by_fold.values() for other in group[1:]]
    if not pairs:
        return
    others = [f"{b!r} from {a!r}" for a, b in pairs[1:]]
    shown = first_few([f"{pairs[0][1]!r} differs from {pairs[0][0]!r}", *others], SHOWN)
    fix = "Set --merge_label_variants if they are one label, or list both in --label_names."
    where = train.where(survey.first_row[pairs[0][1]], column)
    raise DataError(f"{shown} only in case or spaces", where=where, fix=fix)


def _refuse_typos(train: Source, column: str, survey: Survey) -> None:
    """Refuse a rare label that is nearly equal to one that is _TYPO_SHARE times as frequent: probably a typing error."""
    for name, count in survey.counts.items():
        for other, often in survey.counts.items():
            if often >= _TYPO_SHARE * count and len(name) > 3 and not (is_whole(name) or is_whole(other)):
                digits, other_digits = (re.sub(r"\D", "", text) for text in (name, other))
                if SequenceMatcher(None, name, other).ratio() < 0.85 or digits != other_digits:
                    continue
                problem = f"{name!r} ({count:,} of {survey.rows:,} rows) reads like {other!r} ({often:,} rows)"
                fix = f"Did you mean {other!r}? If not, list both in --label_names."
                raise DataError(problem, where=train.where(survey.first_row[name], column), fix=fix)


LARGEST_SCORE = 1e8
"""A regression label. The squared gradient norm of a model fitted to larger ones exceeds 32 bits."""


def read_scores(source: Source, column: str, *, is_test: bool) -> Any:
    """The scores as an Arrow column; nan for a test split without any."""
    import pyarrow as pa

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, np.nan, dtype=np.float32))
    parts = [_numbers(label_cells(t.column(column)), source, column, at) for at, t in source.scan([column])]
    scores = np.concatenate(parts)
    if is_test and (scores == UNLABELLED).all():
        scores = np.full_like(scores, np.nan)
    rounded = scores.astype(np.float32)
    lost = np.abs(scores - rounded)
    spread = float(np.ptp(scores)) if len(scores) and np.isfinite(scores).all() else 0.0
    if spread > 0 and float(lost.max()) > 0.001 * spread:
        row = int(lost.argmax())
        problem = f"{float(scores[row])!r} becomes {float(rounded[row]):.17g} in 32 bits, which loses the differences"
        fix = "Subtract a constant from the labels or rescale them, for example to mean 0 and standard deviation 1."
        raise DataError(problem, where=source.where(row, column), fix=fix)
    return pa.array(rounded)


def _refuse_constant(train: Source, column: str, scores: Any) -> None:
    import pyarrow.compute as pc

    if len(scores) > 1 and pc.count_distinct(scores).as_py() == 1:
        problem = f"all {len(scores):,} rows have the label {scores[0].as_py():g}: there is nothing to learn"
        raise DataError(problem, where=train.where(0, column), fix="Add rows with other labels.")


def _numbers(cells: Any, source: Source, column: str, start: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_string_type(cells.type):
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
    too_large = np.abs(numbers) > LARGEST_SCORE
    if too_large.any():
        at = int(np.argmax(too_large))
        problem = f"the label {cells[at].as_py()} is too large: training overflows above {LARGEST_SCORE:g}"
        fix = "Rescale the labels, for example to mean 0 and standard deviation 1."
        raise DataError(problem, where=source.where(start + at, column), fix=fix)
    return numbers


def unwrap_single_labels(sources: Mapping[str, Source], columns: Columns) -> dict[str, Source]:
    """Replace lists of one label by that label, for tasks with one label per row."""
    label = columns.label
    if label is None or columns.task is Task.MULTILABEL:
        return dict(sources)
    return {
        split: _unwrap(source, label)
        if label in source.column_names and is_list_type(source.type_of(label)) and not class_names(source, label)
        else source
        for split, source in sources.items()
    }


def _unwrap(source: Source, label: str) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    table = source.dataset.with_format("arrow")[:]
    lists = table.column(label).to_pylist()
    long = next((row for row, cell in enumerate(lists) if cell is not None and len(cell) > 1), None)
    if long is not None:
        problem = f"{len(lists[long])} labels, expected one"
        raise DataError(problem, where=source.where(long, label), fix="Use one label per row.")
    cells = pa.array([cell[0] if cell else None for cell in lists], table.schema.field(label).type.value_type)
    return source.with_rows(Dataset(table.set_column(table.column_names.index(label), label, cells)))


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


MOST_BYTES = 1 << 30
"""Of a review file."""


def spelling_of(counts: Mapping[str, int]) -> dict[str, str]:
    """Each label -> the most frequent label that it is a variant of, stripped; labels that stay as they are are left out."""
    by_key: dict[str, str] = {}
    for name in sorted(counts, key=lambda n: -counts[n]):
        by_key.setdefault(alike(name), name.strip() or name)
    return {name: by_key[alike(name)] for name in counts if by_key[alike(name)] != name}


def merge_variants(
    sources: Mapping[str, Source], label: str, notes: list[str], *, names: Sequence[str] = ()
) -> dict[str, Source]:
    """The sources with one spelling of each label: that of `names`, else the most frequent one of train."""
    labelled = {split: source for split, source in sources.items() if label in source.column_names}
    counts = {split: survey_labels(source, label).counts for split, source in labelled.items()}
    every = {name: 0 for found in counts.values() for name in found} | counts.get("train", {})
    most = 1 + max(every.values(), default=0)
    changed = spelling_of(every | dict.fromkeys(names, most))
    if changed:
        shown = first_few([f"{old!r} as {new!r}" for old, new in changed.items()], SHOWN)
        notes.append(f"Labels that differ only in case, spaces or form are one, as requested: {shown}.")
    return {**sources, **{split: _respell(source, label, changed) for split, source in labelled.items()}}


def _respell(source: Source, column: str, changed: Mapping[str, str]) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    kind = source.type_of(column)
    if not changed or "string" not in str(kind):
        return source
    table = source.dataset.with_format("arrow")[:]
    cells: Any = table.column(column).to_pylist()
    if is_list_type(kind):
        new = [None if row is None else list(dict.fromkeys(changed.get(v, v) for v in row)) for row in cells]
    else:
        new = [changed.get(value, value) for value in cells]
    table = table.set_column(table.column_names.index(column), column, pa.array(new, kind))
    return source.with_rows(Dataset(table))


def correct_labels(part: Part, path: Path, columns: Sequence[str], labels: LabelMap) -> tuple[Part, int]:
    """The part with the labels of a review file, and how many changed. A row whose text differs from the data is refused."""
    if labels.task is Task.MULTILABEL:
        raise DataError("a labels file holds one label a row; these rows have several", where=str(path))
    values = part.encoded.with_format("numpy", columns=["labels"])[:]["labels"].copy()
    cells = part.source.dataset.select_columns(list(columns))
    changed = 0
    for where, row, texts, label in _read_corrections(path, columns):
        if row >= len(values):
            raise DataError(f"row {row + 1}: the data has {len(values):,} rows", where=where)
        if [str(cell) for cell in cells[row].values()] != texts:
            fix = "Audit the data as it is now, and correct the new file."
            raise DataError(f"row {row + 1} has another text in the data", where=where, fix=fix)
        value = _value_of(label, labels, f"{where}:label")
        changed += bool(values[row] != np.asarray(value, dtype=values.dtype))
        values[row] = value
    feature = part.encoded.features["labels"]
    encoded = part.encoded.remove_columns(["labels"]).add_column("labels", values, feature=feature)
    return replace(part, encoded=encoded), changed


def _read_corrections(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, int, list[str], str]]:
    """(place in the file, row from 0, texts, label) of each row of the file. Its other columns are for the reader."""
    try:
        text = read_plain(path, MOST_BYTES, follow=True).decode("utf-8-sig")
    except (OSError, BadFile, UnicodeDecodeError) as error:
        raise DataError(f"the labels file cannot be read: {error}", where=str(path)) from None
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    missing = [name for name in ("row", *columns, "label") if name not in (table.fieldnames or ())]
    if missing:
        fix = "Use a file that `tunesmith audit --review_file` wrote for this data."
        raise DataError(f"the column {missing[0]!r} is missing", where=str(path), fix=fix)
    for cells in table:
        where, number = f"{path}:{table.line_num}", cells["row"] or ""
        if not number.isdecimal() or int(number) < 1:
            raise DataError(f"{number!r} is not a row number", where=f"{where}:row", fix="Rows count from 1.")
        yield where, int(number) - 1, [cells[name] or "" for name in columns], (cells["label"] or "").strip()


def _value_of(label: str, labels: LabelMap, where: str) -> float:
    if labels.task is Task.REGRESSION:
        try:
            number = float(label)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{label!r} is not a number", where=where)
        return number
    if label not in labels.names:
        fix = did_you_mean(label, labels.names) or "Write one of the labels of the data."
        raise DataError(f"{label!r} is not one of {', '.join(labels.names[:8])}", where=where, fix=fix)
    return labels.names.index(label)
