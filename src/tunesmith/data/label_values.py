"""The values of a label column: names, counts and first rows in one vectorized pass; cells with several labels; and labels
that look the same to a person.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunesmith.data.source import Ints, Source
from tunesmith.errors import DataError

MAX_LABELS = 10_000
"""A column with more distinct values does not hold labels; counting stops there."""

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
ANY_NUMBER = re.compile(
    r"^[€$£¥₹]?\s?[+-]?(\d{1,3}(\.\d{3})+(,\d+)?|\d{1,3}(,\d{3})+(\.\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][+-]?\d+)?(\s?[%€$£¥₹])?$"
)
"""A number in any notation: with decimal comma, thousands separators, percent or currency sign."""
SEPARATORS = ("|", ";")
"""Characters that separate labels beyond doubt if the parts of cells repeat."""
DOUBTFUL_SEPARATORS = {",": "comma", "/": "slash", " ": "space"}
"""Characters that may be part of a name, so that the user is asked."""


@dataclass(frozen=True)
class LabelBatch:
    """Some rows of a label column. `cells` are the cells of `column`, or the items of its lists; cell i belongs to row `rows[i]`
    of the source. `names[i]` is cell i as a label name: null where missing, "-1" where unlabelled.
    """

    column: Any
    cells: Any
    rows: Ints
    names: Any


def label_batches(source: Source, column: str) -> Iterator[LabelBatch]:
    """The labels of a source, one batch after the other. A ClassLabel id outside of its names is a DataError."""
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
    """`counts` and `first_row` by label name; missing cells are in neither."""

    rows: int = 0
    is_list: bool = False
    is_float: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first_row: dict[str, int] = field(default_factory=dict)
    first_missing: int | None = None
    numbers: int = 0
    fractions: int = 0
    too_many: bool = False

    @property
    def looks_like_scores(self) -> bool:
        """At least 95% numbers, some with a fraction: scores with perhaps a few bad cells, not classes."""
        values = self.numbers if self.too_many else sum(self.counts.values())
        return self.fractions > 0 and self.numbers >= 0.95 * max(values, 1) and not self.is_list


def survey_labels(source: Source, column: str) -> Survey:
    """Reads the whole column."""
    import pyarrow as pa

    survey = Survey()
    for batch in label_batches(source, column):
        survey.rows += len(batch.column)
        survey.is_list = survey.is_list or is_list_type(batch.column.type)
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
    """Counts numbers and numbers with a fraction."""
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


def has_single_labels(source: Source, column: str) -> bool:
    """Whether every list of a column has exactly one item; missing lists do not count."""
    import pyarrow.compute as pc

    widths: set[int | None] = set()
    for _, table in source.scan([column]):
        widths |= set(pc.unique(pc.list_value_length(table.column(column))).to_pylist())
    return widths - {None} == {1} and class_names(source, column) is None


def class_names(source: Source, column: str) -> list[str] | None:
    """The names of a ClassLabel feature, also inside a list; None for any other column."""
    feature = source.dataset.features[column]
    inner = getattr(feature, "feature", feature)
    if isinstance(inner, list) and inner:
        inner = inner[0]
    names = getattr(inner, "names", None)
    return list(names) if names else None


def is_list_type(arrow_type: Any) -> bool:
    """Whether cells are lists: several labels per row."""
    import pyarrow as pa

    return isinstance(arrow_type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def is_string_type(arrow_type: Any) -> bool:
    """Whether cells are text that the functions of pyarrow take."""
    import pyarrow as pa

    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def label_cells(column: Any) -> Any:
    """A column of labels as one array; decimals, as databases write them, are numbers."""
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
    raise DataError(f"column {column!r} holds {kind}, which is not a label", where=source.origin, fix=fix)


def find_separator(counts: Mapping[str, int]) -> str | None:
    """What separates several labels in one cell: a character, "json" for lists in brackets, or None."""
    cells = [cell for cell in counts if cell]
    if cells and all(cell.strip().startswith("[") and cell.strip().endswith("]") for cell in cells):
        return "json"
    return next((sep for sep in (*SEPARATORS, *DOUBTFUL_SEPARATORS) if _sets_apart(sep, cells, counts)), None)


def _sets_apart(separator: str, cells: Sequence[str], counts: Mapping[str, int]) -> bool:
    """Whether the parts of cells occur again in other cells, as labels do."""
    several = [cell for cell in cells if separator in cell]
    if sum(counts[cell] for cell in several) < 2 or all(ANY_NUMBER.match(cell) for cell in cells):
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


def visible(text: str) -> str:
    """The text without invisible characters: zero-width spaces and joiners, direction marks."""
    return "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Cc"))


def fold_case(name: str) -> str:
    """Equal for labels that differ only in case or spaces."""
    return " ".join(name.casefold().split())


def fold_number(name: str) -> str:
    """Equal for labels that differ only in the way a number is written."""
    try:
        return repr(float(name)) if name.strip().isascii() and "_" not in name else name
    except ValueError:
        return name


def alike(name: str) -> str:
    """Equal for labels that differ only in case, spaces, Unicode form, invisible characters or the way a number is written."""
    return fold_case(fold_number(unicodedata.normalize("NFC", visible(name))))


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
