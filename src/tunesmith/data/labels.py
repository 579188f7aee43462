"""From a label column to the column "labels": the kind of its cells, one list of names for all splits, and the checks before
training.

Names come from `label_names`, else from a ClassLabel, else from the values in train: whole numbers in numeric order, text in code
point order; a trained head with the same names keeps its order. The second of two classes is the positive one, whose
F1, precision and recall are reported. A label that is not in train is refused. -1 means unlabeled and is allowed in test
only, unless `label_names` has it. Labels that differ only in case or spaces are one question.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.rows import TARGETS, Columns, Ints, Part, Source, add_column
from tunesmith.errors import ConfigError, DataError, did_you_mean, first_few
from tunesmith.labels import UNLABELED, VARIANTS, LabelMap, Task, fold_label, match_names

if TYPE_CHECKING:
    from datasets import Dataset


ON = frozenset(["1", "1.0", "true", "yes", "y", "ja", "oui", "si", "sí", "sim", "是"])
OFF = frozenset(["0", "0.0", "false", "no", "n", "nein", "non", "não", "否"])
MAX_LABELS = 10_000
"""Counting stops at this many different values."""

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
ANY_NUMBER = re.compile(
    r"^[€$£¥₹]?\s?[+-]?(\d{1,3}(\.\d{3})+(,\d+)?|\d{1,3}(,\d{3})+(\.\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][+-]?\d+)?(\s?[%€$£¥₹])?$"
)
"""A number in any notation: with decimal comma, thousands separators, percent or currency sign."""


@dataclass(frozen=True)
class LabelBatch:
    """Some rows of a label column. `cells` are the cells of `column`, or the items of its lists; cell i belongs to row `rows[i]`
    of the source. `names[i]` is cell i as a label name: null if missing, "-1" if unlabeled.
    """

    column: Any
    cells: Any
    rows: Ints
    names: Any


def label_batches(source: Source, column: str) -> Iterator[LabelBatch]:
    """Yield the labels of a source in batches. A ClassLabel id outside of its names is a DataError."""
    import pyarrow.compute as pc

    known = class_names(source, column)
    for start, table in source.scan([column]):
        whole = cells = label_cells(table.column(column))
        rows = np.arange(start, start + len(whole))
        if is_list_type(whole.type):
            cells, rows = pc.list_flatten(whole), rows[pc.list_parent_indices(whole).to_numpy(zero_copy_only=False)]
        yield LabelBatch(whole, cells, rows, _as_names(cells, known, source, column, rows))


@dataclass
class Survey:
    """`counts` and `first_row` by label name; missing cells are not counted."""

    rows: int = 0
    lengths: set[int] = field(default_factory=set)
    """Lengths of the lists, if the cells are lists; missing ones don't count."""
    is_float: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first_row: dict[str, int] = field(default_factory=dict)
    first_missing: int | None = None
    numbers: int = 0
    fractions: int = 0
    too_many: bool = False

    @property
    def looks_like_scores(self) -> bool:
        """Return whether at least 95% are numbers, some with a fraction: scores with perhaps a few bad cells, not classes."""
        values = self.numbers if self.too_many else sum(self.counts.values())
        return self.fractions > 0 and self.numbers >= 0.95 * max(values, 1) and not self.lengths


def survey_labels(source: Source, column: str) -> Survey:
    """Read the whole column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    survey = Survey()
    for batch in label_batches(source, column):
        survey.rows += len(batch.column)
        if is_list_type(batch.column.type):
            survey.lengths |= set(pc.unique(pc.list_value_length(batch.column).drop_null()).to_pylist())
        survey.is_float = survey.is_float or pa.types.is_floating(batch.cells.type)
        _count(survey, batch)
        _measure(survey, batch.cells)
    return survey


def _count(survey: Survey, batch: LabelBatch) -> None:
    import pyarrow.compute as pc

    if batch.names.null_count and survey.first_missing is None:
        survey.first_missing = int(batch.rows[pc.index(pc.is_null(batch.names), True).as_py()])
    if survey.too_many:
        return
    for pair in pc.value_counts(batch.names.drop_null()):
        name, count = pair["values"].as_py(), pair["counts"].as_py()
        if name not in survey.counts:
            if len(survey.counts) == MAX_LABELS:
                survey.too_many = True
                return
            survey.first_row[name] = int(batch.rows[pc.index(batch.names, name).as_py()])
        survey.counts[name] = survey.counts.get(name, 0) + count


def _measure(survey: Survey, cells: Any) -> None:
    """Count numbers and numbers with a fraction."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(cells.type):
        survey.numbers += len(cells) - cells.null_count
        return
    if is_string_type(cells.type):
        cells = cells.filter(pc.match_substring_regex(cells, NUMBER)).cast(pa.float64())
    elif not pa.types.is_floating(cells.type):
        return
    finite = cells.filter(pc.is_finite(cells))
    survey.numbers += len(finite)
    survey.fractions += pc.sum(pc.not_equal(pc.floor(finite), finite)).as_py() or 0


def class_names(source: Source, column: str) -> list[str] | None:
    """Return the names of a ClassLabel feature, also inside a list; None for any other column."""
    feature = source.dataset.features[column]
    inner = getattr(feature, "feature", feature)
    if isinstance(inner, list) and inner:
        inner = inner[0]
    names = getattr(inner, "names", None)
    return list(names) if names else None


def is_list_type(arrow_type: Any) -> bool:
    """Return whether cells are lists: several labels per row."""
    import pyarrow as pa

    return isinstance(arrow_type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def is_string_type(arrow_type: Any) -> bool:
    """Return whether cells are a text type that pyarrow's functions accept."""
    import pyarrow as pa

    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def label_cells(column: Any) -> Any:
    """Return a column of labels as one array; decimals, as databases write them, become numbers."""
    import pyarrow as pa

    cells = column.combine_chunks()
    return cells.cast(pa.float64()) if pa.types.is_decimal(cells.type) else cells


def _as_names(cells: Any, known: list[str] | None, source: Source, column: str, rows: Ints) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.type
    if known is not None and pa.types.is_integer(kind):
        bad = pc.fill_null(pc.or_(pc.less(cells, -1), pc.greater_equal(cells, len(known))), False)
        if pc.any(bad).as_py():
            at = pc.index(bad, True).as_py()
            problem = f"label id {cells[at].as_py()} is outside of 0 to {len(known) - 1} ({', '.join(known[:6])})"
            raise DataError(
                problem, where=source.where(int(rows[at]), column), fix="Correct the id; -1 means unlabeled."
            )
        padded = pa.array([*known, "-1"])
        return padded.take(pc.if_else(pc.equal(cells, -1), pa.scalar(len(known), kind), cells))
    if pa.types.is_floating(kind):
        cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, kind), cells)
        whole = pc.all(pc.equal(pc.floor(cells), cells)).as_py()
        fits = pc.all(pc.less(pc.abs(cells), 2.0**53)).as_py()
        return (cells.cast(pa.int64()) if whole is not False and fits is not False else cells).cast(pa.string())
    if is_string_type(kind) or pa.types.is_string_view(kind):
        cells = cells.cast(pa.string())
        return pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return cells.cast(pa.string())
    fix = "A label is text, a number, true/false or a list of these."
    raise DataError(f"column {column!r} contains {kind}, which is not a label", where=source.origin, fix=fix)


def find_separator(counts: Mapping[str, int]) -> str | None:
    """Return the separator of labels in a cell: a character, "json" for lists in brackets, or None."""
    cells = [cell for cell in counts if cell]
    if cells and all(cell.strip().startswith("[") and cell.strip().endswith("]") for cell in cells):
        return "json"
    # A comma may be part of a name, so that the user is asked.
    return next((separator for separator in "|;," if _separates(separator, cells, counts)), None)


def _separates(separator: str, cells: Sequence[str], counts: Mapping[str, int]) -> bool:
    """Return whether the parts of cells are repeated in other cells, as labels are."""
    several = [cell for cell in cells if separator in cell]
    if sum(counts[cell] for cell in several) < 2 or all(ANY_NUMBER.match(cell) for cell in cells):
        return False
    uses = Counter(part for cell in cells for part in split_cell(cell, separator))
    again = sum(count > 1 for count in uses.values())
    short = all(len(part.split()) <= 4 for part in uses)
    return short and again >= len(uses) / 2 and len(uses) < len(cells) + len(several)


def split_cell(cell: str | None, separator: str) -> list[str]:
    """Return the labels of one cell, without surrounding spaces."""
    if cell is None or not cell.strip():
        return []
    if separator != "json":
        return [part.strip() for part in cell.split(separator) if part.strip()]
    if "," not in cell:  # numpy prints ['a' 'b'], which Python would read as one string
        cell = re.sub(r"(['\"])\s+(?=['\"])", r"\1, ", cell)
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


def are_lists_of_one(cells: Mapping[str, int]) -> bool:
    """Return whether every cell is a list of one label that is written as text."""
    try:
        return find_separator(cells) == "json" and {len(split_cell(cell, "json")) for cell in cells} == {1}
    except ValueError:
        return False


def normalize_label(name: str) -> str:
    """Return a key that is equal for labels that differ only in VARIANTS or in the way a number is written."""
    if name.strip().isascii() and "_" not in name:
        with suppress(ValueError):
            return repr(float(name))
    return fold_label(name)


ENCODED = "labels"
SUM_TOLERANCE = 0.01
SHOWN = 4
_UNLABELED_NAME = str(UNLABELED)
_TYPO_SHARE = 200


@dataclass(frozen=True, slots=True)
class Naming:
    """`names` in id order; `values` are the corresponding values in the data."""

    names: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class LabelRules:
    """Settings that determine the labels, in addition to the data."""

    names: tuple[str, ...] | None = None
    """The labels that the user listed, in id order."""
    head_names: Sequence[str] = ()
    """Labels of the model's head, in id order."""
    positive: str | None = None
    separator: str | None = None
    merge_variants: bool = False
    allow_single: bool = False


def encode_labels(
    sources: Mapping[str, Source], columns: Columns, rules: LabelRules, notes: list[str]
) -> tuple[LabelMap, dict[str, Dataset]]:
    """Return the map and the splits with "labels": int64 (-1 unlabeled), float32 (nan unlabeled) or list of float32.

    A split whose name starts with "test" may be unlabeled: without the column, or with -1. Merged labels are named in `notes`.
    """
    column = columns.label
    if columns.task is Task.MULTILABEL:
        sources = unfold_labels(sources, column, rules.separator)
    if columns.task is not Task.REGRESSION:
        sources = respell_labels(sources, column, notes, rules)
    if not any(source.has_label(column) for source in sources.values()):
        raise next(iter(sources.values())).no_column(column, "--label_column_name")
    if ENCODED in columns.text:
        raise DataError(f"a text column is named {ENCODED!r}, as the labels are inside", fix="Rename it in the data.")
    if columns.task is Task.REGRESSION:
        scores = {split: read_scores(s, column, is_test=split.startswith("test")) for split, s in sources.items()}
        train_scores = scores.get("train", [])
        spread = float(np.ptp(train_scores)) if len(train_scores) > 1 and not rules.allow_single else 1.0
        if spread == 0.0:
            raise _nothing_to_learn(sources["train"], column, f"label {train_scores[0].as_py():g}")
        if spread < SMALLEST_SPREAD:
            problem = f"all labels are within {spread:.2g} of each other, too close for 32-bit gradients"
            fix = "Rescale the labels, for example to mean 0 and standard deviation 1."
            raise DataError(problem, where=sources["train"].where(0, column), fix=fix)
        return LabelMap((column,), Task.REGRESSION), _with_labels(sources, scores)
    labeled = {split: source for split, source in sources.items() if column in source.column_names}
    if columns.task is not Task.MULTILABEL and next(iter(sources.values())).label_parts(column):
        return _encode_probabilities(sources, column, rules)
    surveys = {split: survey_labels(source, column) for split, source in labeled.items()}
    first = "train" if "train" in labeled else next(iter(labeled))
    train, multilabel = labeled[first], columns.task is Task.MULTILABEL
    if multilabel:
        _refuse_indicators(train, column, surveys[first])
    naming = _choose_names(train, columns, surveys[first], rules)
    if not multilabel:
        own = naming.names != columns.default_names and match_names(rules.head_names, naming.names) is None
        free = own and rules.names is None and class_names(train, column) is None
        naming = _put_positive_last(naming, surveys[first].counts, rules.positive, free=free)
    for split, source in labeled.items():
        unlabeled = split.startswith("test") and not multilabel
        _check_split(source, column, surveys[split], naming, unlabeled_allowed=unlabeled, is_train=split == first)
    if multilabel:
        lists = {split: encode_lists(source, column, naming.values) for split, source in sources.items()}
        return LabelMap(naming.names, Task.MULTILABEL), _with_labels(sources, lists)
    present = surveys[first].counts.keys() & set(naming.values)
    if len(present) == 1 and not rules.allow_single:
        raise _nothing_to_learn(train, column, f"one label {min(present)!r}")
    ids = {split: _ids(source, column, naming) for split, source in sources.items()}
    return LabelMap.for_classes(naming.names), _with_labels(sources, ids)


def _refuse_indicators(train: Source, column: str, survey: Survey) -> None:
    """Refuse lists with a 0 or 1 for each label, and lists of numbers with fractions."""
    indicators = survey.counts.keys() <= {"0", "1", "false", "true"}
    if survey.is_float or (indicators and sum(survey.counts.values()) >= 2 * survey.rows):
        fix = 'List the labels of each row, such as ["a", "b"], or write a 0/1 column for each label.'
        raise DataError("lists of numbers, expected lists of labels", where=train.where(0, column), fix=fix)


def _nothing_to_learn(train: Source, column: str, label: str) -> DataError:
    problem = f"all {train.dataset.num_rows:,} rows have the {label}: there is nothing to learn"
    return DataError(problem, where=train.where(0, column), fix="Add rows of a second label.")


def _ids(source: Source, column: str, naming: Naming) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, UNLABELED, dtype=np.int64))
    values = pa.array(naming.values, pa.string())
    found = [pc.index_in(batch.names, value_set=values) for batch in label_batches(source, column)]
    return pc.fill_null(pa.chunked_array(found).combine_chunks(), UNLABELED).cast(pa.int64())


def _with_labels(sources: Mapping[str, Source], labels: Mapping[str, Any]) -> dict[str, Dataset]:
    """Return the rows of each source with the column "labels", which replaces any column of that name."""
    return {split: add_column(source.dataset, ENCODED, labels[split]) for split, source in sources.items()}


def _encode_probabilities(
    sources: Mapping[str, Source], column: str, rules: LabelRules
) -> tuple[LabelMap, dict[str, Dataset]]:
    """As `encode_labels`, for one probability column per class. "labels" is the most probable class.

    The classes are called as the columns, without a prefix that all share and that ends with an underscore.
    """
    import pyarrow as pa

    train = next(iter(sources.values()))
    parts = train.label_parts(column)
    prefix = parts[0].partition("_")[0] + "_"
    shared = all(part.startswith(prefix) and part != prefix for part in parts)
    names = tuple(part.removeprefix(prefix) if shared else part for part in parts)
    order = match_names(rules.names or rules.head_names, names)
    if rules.names is not None and order is None:
        fix = "Omit --label_names, or rename the columns."
        raise ConfigError(
            f"the probability columns are those of {', '.join(names[:20])}, not of --label_names", fix=fix
        )
    column_of = dict(zip(names, parts, strict=True))
    naming = Naming(order or names, tuple(column_of[name] for name in order or names))
    naming = _put_positive_last(naming, {}, rules.positive, free=order is None)
    encoded = {}
    for split, source in sources.items():
        if not source.has_label(column):
            ids = pa.array(np.full(source.dataset.num_rows, UNLABELED, dtype=np.int64))
            encoded[split] = add_column(source.dataset, ENCODED, ids)
            continue
        table = _read_probabilities(source, naming.values)
        encoded[split] = add_column(source.dataset, ENCODED, pa.array(table.argmax(axis=1)))
        if split == "train":
            encoded[split] = add_column(encoded[split], TARGETS, _as_arrow(table))
    return LabelMap.for_classes(naming.names), encoded


def _read_probabilities(source: Source, columns: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the probabilities (rows, columns), scaled to a sum of exactly 1. Invalid ones are a DataError."""
    table = np.stack([_read_numbers(source, name) for name in columns], axis=1)
    sums = table.sum(axis=1)
    if (table < 0).any():
        row, place = np.argwhere(table < 0)[0].tolist()
        problem = f"the probability {table[row, place]:g} is negative"
        raise DataError(problem, where=source.where(row, columns[place]), fix="Write a number from 0 to 1.")
    wrong = np.abs(sums - 1) > SUM_TOLERANCE
    if wrong.any():
        row = int(wrong.argmax())
        fix = "List one column for each class. If a row can have several labels, write 0 or 1."
        where = source.where(row, ",".join(columns))
        raise DataError(f"the probabilities sum to {sums[row]:.4f}, expected 1", where=where, fix=fix)
    return np.asarray(table / sums[:, None])


def _read_numbers(source: Source, column: str) -> np.ndarray[Any, Any]:
    parts = [_numbers(label_cells(t.column(column)), source, column, at) for at, t in source.scan([column])]
    return np.concatenate(parts)


def add_confidence(source: Source, encoded: Dataset, name: str, labels: LabelMap) -> Dataset:
    """Return the encoded training rows with soft targets: the confidence on the label, the rest spread over the other classes."""
    if name not in source.column_names:
        raise source.no_column(name, "--label_confidence_column_name")
    if labels.task not in (Task.BINARY, Task.MULTICLASS) or TARGETS in encoded.column_names:
        fix = "Omit it."
        raise ConfigError("--label_confidence_column_name needs a single label column with one class per row", fix=fix)
    confidence = _read_numbers(source, name)
    bad = (confidence < 0) | (confidence > 1)
    if bad.any():
        row = int(bad.argmax())
        fix = "Write a number from 0 to 1; divide percentages by 100."
        raise DataError(f"{confidence[row]:g} is not a probability", where=source.where(row, name), fix=fix)
    rest = (1 - confidence) / (len(labels) - 1)
    targets = np.repeat(rest[:, None], len(labels), axis=1)
    targets[np.arange(len(targets)), np.asarray(encoded.with_format("numpy")[ENCODED][:])] = confidence
    return add_column(encoded, TARGETS, _as_arrow(targets))


def notes_on_classes(parts: Mapping[str, Part], labels: LabelMap) -> list[str]:
    """Return notes: which class F1 refers to, and splits without any example of a class."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    one = f"F1, precision and recall refer to the class {labels.positive_name!r} (--positive_label)."
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


def _choose_names(train: Source, columns: Columns, survey: Survey, rules: LabelRules) -> Naming:
    """Return the names and their values in the data. `columns.default_names` (GLUE's) apply to whole-number labels only.

    If neither names nor a ClassLabel are set and the names are those of the model's head, its order is used.
    """
    column, default_names = columns.label, columns.default_names
    found = [name for name in survey.counts if name != _UNLABELED_NAME or name in (rules.names or ())]
    features = class_names(train, column)
    if rules.names is not None:
        return _given_names(rules.names, features or found, train, column)
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
    order = match_names(rules.head_names, names) or names
    value_of = dict(zip(names, values, strict=True))
    return Naming(order, tuple(value_of[name] for name in order))


def _given_names(names: tuple[str, ...], found: Sequence[str], train: Source, column: str) -> Naming:
    if set(found) & set(names) or not all(is_whole(name) for name in found):
        return Naming(names, names)
    ordered = tuple(sorted(found, key=int))
    if all(0 <= int(name) < len(names) for name in found):
        return Naming(names, tuple(str(i) for i in range(len(names))))
    if len(found) == len(names):
        return Naming(names, ordered)
    problem = f"--label_names has {len(names)} names for the {len(found)} labels {', '.join(ordered[:8])}"
    raise DataError(problem, where=f"{train.origin}:{column}", fix="List one name per label, in id order.")


def is_whole(name: str) -> bool:
    """Return whether a label is an integer without leading zeros or a plus sign."""
    try:
        return str(int(name)) == name
    except ValueError:
        return False


def _put_positive_last(naming: Naming, counts: Mapping[str, int], asked: str | None, *, free: bool) -> Naming:
    """Return two classes with the positive one second: `asked`, else 1 of 0 and 1, else the rarer one in train.

    If the order is fixed (label_names, a ClassLabel, a trained head, GLUE), a different positive class is refused.
    """
    if asked is not None and asked not in naming.names:
        problem = f"--positive_label {asked!r} is not one of {', '.join(naming.names[:20])}"
        raise ConfigError(problem, fix=did_you_mean(asked, naming.names))
    if len(naming.names) != 2:
        if asked is not None:
            problem = f"--positive_label requires two classes, and there are {len(naming.names)}"
            raise ConfigError(problem, fix="Omit it.")
        return naming
    positive = asked
    switches = ({"0", "1"}, {"0.0", "1.0"}, {"false", "true"})
    if positive is None and free and {name.lower() for name in naming.names} not in switches:
        first, second = (counts.get(value, 0) for value in naming.values)
        positive = naming.names[0] if first < second else None
    if positive is None or positive == naming.names[1]:
        return naming
    if not free:
        fix = f"Set --label_names {naming.names[1]},{naming.names[0]} as well."
        raise ConfigError(f"--positive_label {asked!r} is label 0 here, and the order is fixed", fix=fix)
    return Naming(naming.names[::-1], naming.values[::-1])


def _check_split(
    source: Source, column: str, survey: Survey, naming: Naming, *, unlabeled_allowed: bool, is_train: bool
) -> None:
    """Refuse missing, unlabeled and unknown labels with their first row."""
    if survey.first_missing is not None:
        fix = "Fill it in; -1 marks an unlabeled test row."
        raise DataError("the label is missing", where=source.where(survey.first_missing, column), fix=fix)
    for value, row in survey.first_row.items():
        if value in naming.values:
            continue
        where = source.where(row, column)
        if value == _UNLABELED_NAME:
            if unlabeled_allowed:
                continue
            fix = f"Remove such rows, or set --label_names={','.join((value, *naming.values[:20]))} if -1 is a class."
            raise DataError(f"-1 means unlabeled, which {source.name} rows cannot be", where=where, fix=fix)
        raise _unknown(value, naming, where, is_train=is_train)


def _unknown(value: str, naming: Naming, where: str, *, is_train: bool) -> DataError:
    shown = naming.values if len(naming.values) <= 20 else (*naming.values[:20], "...")
    same = next((v for v in naming.values if normalize_label(v) == normalize_label(value)), None)
    if same is not None:
        problem = f"{value!a} differs from {same!a} only in {VARIANTS}, or in the way a number is written"
        return DataError(problem, where=where, fix="Write both the same, or set --merge_label_variants.")
    of = "" if is_train else " (the labels in train)"
    problem = f"{value!r} is not one of {', '.join(shown)}{of}"
    fix = did_you_mean(value, naming.values) or "Correct it, or add such rows to train."
    return DataError(problem, where=where, fix=fix)


def _refuse_variants(train: Source, column: str, survey: Survey) -> None:
    """Refuse labels that differ only in VARIANTS or in a final ".0"; the error lists them and two fixes."""
    by_fold: dict[str, list[str]] = {}
    for name in sorted(survey.counts, key=lambda n: -survey.counts[n]):
        by_fold.setdefault(fold_label(re.sub(r"^(-?\d+)\.0+$", r"\1", name.strip())), []).append(name)
    pairs = [(group[0], other) for group in by_fold.values() for other in group[1:]]
    if not pairs:
        return
    others = [f"{b!a} from {a!a}" for a, b in pairs[1:]]
    shown = first_few([f"{pairs[0][1]!a} differs from {pairs[0][0]!a}", *others], SHOWN)
    fix = "Set --merge_label_variants if they are one label, or list both in --label_names."
    where = train.where(survey.first_row[pairs[0][1]], column)
    raise DataError(f"{shown} only in {VARIANTS}, or in a final .0", where=where, fix=fix)


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
"""Largest regression label. With larger ones, the squared gradient norm exceeds 32 bits."""
SMALLEST_SPREAD = 1e-6
"""Smallest range of regression labels. With smaller ones, gradients are below the epsilon of AdamW."""


def read_scores(source: Source, column: str, *, is_test: bool) -> Any:
    """Return the scores as an Arrow column; NaN for a test split without labels."""
    import pyarrow as pa

    if column not in source.column_names:
        return pa.array(np.full(source.dataset.num_rows, np.nan, dtype=np.float32))
    scores = _read_numbers(source, column)
    if is_test and (scores == UNLABELED).all():
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


def _numbers(cells: Any, source: Source, column: str, start: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_string_type(cells.type):
        good = pc.match_substring_regex(cells, NUMBER)
    elif pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type):
        good = pc.is_finite(cells)
    else:
        raise DataError(f"column {column!r} contains {cells.type}, expected numbers", where=source.origin)
    good = pc.fill_null(good, False)
    if not pc.all(good).as_py():
        at = pc.index(good, False).as_py()
        value = cells[at].as_py()
        problem = "the number is missing" if value in (None, "") else f"{value!r} is not a number"
        fix = "Write a finite number in every row."
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
    found = dict(sources)
    for split, source in sources.items():
        if columns.task is Task.MULTILABEL or label not in source.column_names or class_names(source, label):
            continue
        if are_lists_of_one(survey_labels(source, label).counts):
            source = _split_cells(source, label, "json")
        found[split] = _unwrap(source, label) if is_list_type(source.type_of(label)) else source
    return found


def _unwrap(source: Source, label: str) -> Source:
    import pyarrow as pa

    lists = source.dataset.with_format(None)[label][:]
    long = next((row for row, cell in enumerate(lists) if cell is not None and len(cell) > 1), None)
    if long is not None:
        problem = f"{len(lists[long])} labels, expected one"
        raise DataError(problem, where=source.where(long, label), fix="Use one label per row.")
    cells = pa.array([cell[0] if cell else None for cell in lists], source.type_of(label).value_type)
    return source.with_cells(add_column(source.dataset, label, cells))


SEPARATOR_WORDS = {"comma": ",", "slash": "/", "pipe": "|", "semicolon": ";", "space": " ", "tab": "\t"}


def unfold_labels(sources: Mapping[str, Source], label: str, separator: str | None) -> dict[str, Source]:
    """Return sources in which the labels are lists, whatever form they have in the files."""
    train = sources.get("train") or next(iter(sources.values()))
    if train.label_parts(label):
        return {k: _join_indicators(s, s.label_parts(label)) if s.has_label(label) else s for k, s in sources.items()}
    if is_list_type(train.type_of(label)):
        return dict(sources)
    known = SEPARATOR_WORDS.get(separator or "", separator) or find_separator(survey_labels(train, label).counts) or "|"
    return {k: _split_cells(s, label, known) if label in s.column_names else s for k, s in sources.items()}


def _split_cells(source: Source, column: str, separator: str) -> Source:
    """Return the source with lists of labels in the column."""
    lists = []
    for row, cell in enumerate(source.dataset.with_format(None)[column]):
        try:
            lists.append(split_cell(cell, separator))
        except ValueError as error:
            raise DataError(str(error), where=source.where(row, column), fix='Write ["a", "b"].') from None
    return _with_lists(source, column, lists)


def _join_indicators(source: Source, columns: Sequence[str]) -> Source:
    """Return the source with one more column that lists, for each row, the columns that contain 1, true or yes."""
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

    return source.with_cells(add_column(source.dataset, column, pa.array(lists, pa.list_(pa.string()))))


def encode_lists(source: Source, column: str, values: Sequence[str]) -> Any:
    """Return lists of names as an Arrow column with 0.0 or 1.0 for each of `values`; all NaN for unlabeled rows."""
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


def _as_arrow(rows: np.ndarray[Any, Any]) -> Any:
    """Return an Arrow column of lists of float32, from (rows, values)."""
    import pyarrow as pa

    offsets = np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(rows.reshape(-1), dtype=np.float32)))


def respell_labels(sources: Mapping[str, Source], label: str, notes: list[str], rules: LabelRules) -> dict[str, Source]:
    """Return the sources without spaces around labels, if every label has some (files with a space after each comma).

    With `merge_variants`, each label gets one spelling: that of the listed names, else the most frequent one in train.
    """
    labeled = {split: source for split, source in sources.items() if label in source.column_names}
    counts = {split: survey_labels(source, label).counts for split, source in labeled.items()}
    every = {name: 0 for found in counts.values() for name in found} | counts.get("train", {})
    names = rules.names or ()
    changed: dict[str, str] = {}
    if rules.merge_variants:
        every |= dict.fromkeys(names, 1 + max(every.values(), default=0))
        best: dict[str, str] = {}
        for name in sorted(every, key=lambda n: -every[n]):
            best.setdefault(normalize_label(name), name.strip() or name)
        changed = {name: best[normalize_label(name)] for name in every if best[normalize_label(name)] != name}
        if changed:
            shown = first_few([f"{old!r} as {new!r}" for old, new in changed.items()], SHOWN)
            notes.append(f"Labels that differ only in case, spaces or form are one, as requested: {shown}.")
    elif every and not any(name == name.strip() or name in names for name in every):
        notes.append("All labels have spaces around them, which are removed.")
        changed = {name: name.strip() for name in every}
    return {**sources, **{split: _respell(source, label, changed) for split, source in labeled.items()}}


def _respell(source: Source, column: str, changed: Mapping[str, str]) -> Source:
    import pyarrow as pa

    kind = source.type_of(column)
    if not changed or "string" not in str(kind):
        return source
    cells: Any = source.dataset.with_format(None)[column][:]
    if is_list_type(kind):
        new = [None if row is None else list(dict.fromkeys(changed.get(v, v) for v in row)) for row in cells]
    else:
        new = [changed.get(value, value) for value in cells]
    return source.with_cells(add_column(source.dataset, column, pa.array(new, kind)))


def with_targets(part: Part, targets: np.ndarray[Any, Any]) -> Part:
    """Return the part with these probabilities (rows, classes) as the soft labels of its rows."""
    table = np.zeros((part.encoded.num_rows, targets.shape[1]))
    table[slice(None) if part.rows is None else part.rows] = targets
    return replace(part, encoded=add_column(part.encoded, TARGETS, _as_arrow(table)))


def correct_labels(part: Part, review: Source, columns: Sequence[str], labels: LabelMap) -> tuple[Part, int]:
    """Return the part with the labels of a review file, and the number of changes. A row with a different text is refused."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        raise DataError("a labels file contains one class per row; these labels are different", where=review.origin)
    missing = [name for name in ("line", *columns, "label") if name not in review.column_names]
    if missing:
        fix = "Use a file that `tunesmith audit --review_file` wrote for this data."
        raise DataError(f"the column {missing[0]!r} is missing", where=review.origin, fix=fix)
    values = part.encoded.with_format("numpy", columns=["labels"])[:]["labels"].copy()
    cells = part.source.dataset.select_columns(list(columns))
    row_of = {str(line): row for row, line in enumerate(part.source.line_numbers(range(len(values))))}
    changed = 0
    for number, found in enumerate(review.dataset.with_format(None)):
        row = row_of.get(str(found["line"]).strip())
        if row is None or any(str(cell) != str(found[name]) for name, cell in cells[row].items()):
            fix = "Audit the data as it is now, and correct the new file."
            problem = f"{part.source.origin}:{found['line']} has a different text"
            raise DataError(problem, where=review.where(number), fix=fix)
        label = str(found["label"]).strip()
        if label not in labels.names:
            fix = did_you_mean(label, labels.names) or "Write one of the labels of the data."
            problem = f"{label!r} is not one of {', '.join(labels.names[:8])}"
            raise DataError(problem, where=review.where(number, "label"), fix=fix)
        changed += bool(values[row] != labels.names.index(label))
        values[row] = labels.names.index(label)
    feature = part.encoded.features["labels"]
    encoded = part.encoded.remove_columns(["labels"]).add_column("labels", values, feature=feature)
    return replace(part, encoded=encoded), changed
