"""What is in a label column: its values by name, how often, first where, in one vectorised pass; and labels that a person reads
as one and the data holds as two, each kind as one warning with the way out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tunesmith.errors import DataError
from tunesmith.findings import Finding
from tunesmith.reading.column_profile import CURRENCY, number_style
from tunesmith.reading.source import Source

MAX_LABELS = 10_000
"""More distinct values than this are no labels; counting stops there."""

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


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
        """At least 95% numbers, some with a fraction: a score with perhaps a bad cell, not a class."""
        values = self.numbers if self.too_many else sum(self.counts.values())
        return self.fractions > 0 and self.numbers >= 0.95 * max(values, 1) and not self.is_list


def survey_labels(source: Source, column: str) -> Survey:
    """Reads the whole column. A ClassLabel id outside of its names is a DataError."""
    import pyarrow as pa

    survey = Survey()
    names = class_names(source, column)
    for start, table in source.scan([column]):
        cells = label_cells(table.column(column))
        survey.rows += len(cells)
        parents = None
        if is_list_type(cells.type):
            survey.is_list = True
            cells, parents = flatten_lists(cells)
        survey.is_float = survey.is_float or pa.types.is_floating(cells.type)
        labels = as_names(cells, names, source=source, column=column, start=start, parents=parents)
        _count(survey, labels, start, parents)
        _measure(survey, cells)
    return survey


def plain_numbers(cells: Any, style: str | None = None) -> Any:
    """Text cells with 3,5 written as 3.5, 40 % as 40 and, where numbers have the `style` "1.234,5" or "1,234.5", 1234.5."""
    import pyarrow.compute as pc

    if style is not None:
        cells = pc.replace_substring_regex(cells, CURRENCY, "")
        cells = pc.replace_substring(cells, style[1], "")
    return pc.replace_substring_regex(cells, r"^([+-]?\d+)(?:[.,](\d+))?\s?%$|^([+-]?\d+),(\d+)$", r"\1\3.\2\4")


def style_of_numbers(source: Source, column: str) -> str | None:
    """How the numbers of a text column are written, where groups of digits are set apart: "1.234,5" or "1,234.5"."""
    kind = source.dataset.features.arrow_schema.field(column).type
    return number_style(survey_labels(source, column).counts) if "string" in str(kind) else None


def class_names(source: Source, column: str) -> list[str] | None:
    """The names of a ClassLabel feature, also inside a list; None for any other column."""
    feature = source.dataset.features[column]
    inner = getattr(feature, "feature", feature)
    if isinstance(inner, list) and inner:
        inner = inner[0]
    names = getattr(inner, "names", None)
    return list(names) if names else None


def is_list_type(arrow_type: Any) -> bool:
    """Whether cells are lists: several labels a row."""
    import pyarrow as pa

    return isinstance(arrow_type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


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
        kind = found.type
        if len(widths) > 1 or len(found) > 3 or class_names(source, column) or pa.types.is_floating(kind):
            return False
        values |= {str(value).lower() for value in found.to_pylist()}
        if widths == {2} and not twice:
            twice = bool(pc.any(pc.equal(pc.list_element(lists, 0), pc.list_element(lists, 1))).as_py())
    wide = bool(widths - {None, 0, 1, 2})
    return values in ({"0", "1"}, {"false", "true"}) and (wide or twice)


def as_names(
    cells: Any, names: list[str] | None, *, source: Source, column: str, start: int = 0, parents: Any = None
) -> Any:
    """The cells as label names: null where missing, "-1" where unlabelled; exact text for text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.type
    if names is not None and pa.types.is_integer(kind):
        bad = pc.fill_null(pc.or_(pc.less(cells, -1), pc.greater_equal(cells, len(names))), False)
        if pc.any(bad).as_py():
            at = pc.index(bad, True).as_py()
            row = start + (int(parents[at]) if parents is not None else at)
            problem = f"label id {cells[at].as_py()} is outside of 0 to {len(names) - 1} ({', '.join(names[:6])})"
            raise DataError(problem, where=source.where(row, column), fix="Correct the id; -1 means unlabelled.")
        padded = pa.array([*names, "-1"])
        at_end = pc.if_else(pc.equal(cells, -1), pa.scalar(len(names), cells.type), cells)
        return padded.take(at_end)
    if pa.types.is_floating(kind):
        cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, kind), cells)
        whole = pc.all(pc.equal(pc.floor(cells), cells)).as_py()
        fits = pc.all(pc.less(pc.abs(cells), 2.0**53)).as_py()
        return (cells.cast(pa.int64()) if whole is not False and fits is not False else cells).cast(pa.string())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        cells = cells.cast(pa.string())
        return pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return cells.cast(pa.string())
    fix = "A label is text, a number, true/false or a list of these."
    raise DataError(f"column {column!r} holds {kind}, which is not a label", where=source.origin, fix=fix)


def label_cells(column: Any) -> Any:
    """A column of labels as one array; decimals, as databases write them, are numbers."""
    import pyarrow as pa

    cells = column.combine_chunks()
    return cells.cast(pa.float64()) if pa.types.is_decimal(cells.type) else cells


def flatten_lists(lists: Any) -> tuple[Any, Any]:
    """The values of all lists, and the row that each of them is of."""
    import pyarrow.compute as pc

    return pc.list_flatten(lists), pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)


def _count(survey: Survey, labels: Any, start: int, parents: Any) -> None:
    import pyarrow.compute as pc

    def row_of(at: int) -> int:
        return start + (int(parents[at]) if parents is not None else at)

    if labels.null_count and survey.first_missing is None:
        survey.first_missing = row_of(pc.index(pc.is_null(labels), True).as_py())
    if survey.too_many:
        return
    for pair in pc.value_counts(labels.drop_null()):
        name, count = pair["values"].as_py(), pair["counts"].as_py()
        if name not in survey.counts:
            if len(survey.counts) == MAX_LABELS:
                survey.too_many = True
                return
            survey.first_row[name] = row_of(pc.index(labels, name).as_py())
        survey.counts[name] = survey.counts.get(name, 0) + count


def _measure(survey: Survey, cells: Any) -> None:
    """Counts numbers and numbers with a fraction."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.type
    if pa.types.is_integer(kind):
        survey.numbers += len(cells) - cells.null_count
        return
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        cells = cells.filter(pc.match_substring_regex(cells, NUMBER)).cast(pa.float64())
    elif not pa.types.is_floating(kind):
        return
    finite = cells.filter(pc.is_finite(cells))
    survey.numbers += len(finite)
    survey.fractions += pc.sum(pc.not_equal(pc.floor(finite), finite)).as_py() or 0


SHOWN = 4
_FIX = "Write both the same in the data, or list both in --label_names to keep them apart."


def find_alikes(counts: Mapping[str, int]) -> list[Finding]:
    """One warning for each way in which labels look alike; `counts` has the train rows of each label."""
    findings = [_blank([name for name in counts if not visible(name).strip()], counts)]
    known: set[frozenset[str]] = set()
    for kind, key in _KEYS.items():
        groups: dict[str, list[str]] = {}
        for name in counts:
            groups.setdefault(key(name), []).append(name)
        pairs = [(group[0], other) for group in groups.values() for other in group[1:]]
        pairs = [pair for pair in pairs if frozenset(pair) not in known]
        known |= {frozenset(pair) for pair in pairs}
        findings.append(_warning(kind, pairs, counts))
    return [finding for finding in findings if finding is not None]


def visible(text: str) -> str:
    """The text without characters that take no room: zero-width spaces and joiners, marks of direction."""
    return "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Cc"))


def alike(name: str) -> str:
    """Equal for labels that differ only in case, spaces, Unicode form, invisible characters or the way a number is written."""
    return fold_case(_number(unicodedata.normalize("NFC", visible(name))))


def fold_case(name: str) -> str:
    """Equal for labels that differ only in case or spaces."""
    return " ".join(name.casefold().split())


def _number(name: str) -> str:
    try:
        return repr(float(name)) if name.strip().isascii() and "_" not in name else name
    except ValueError:
        return name


_KEYS: dict[str, Callable[[str], str]] = {
    "in their Unicode form (an accent of its own or within the letter)": partial(unicodedata.normalize, "NFC"),
    "in invisible characters": visible,
    "in the way a number is written": _number,
    "in case or spaces": fold_case,
    "in several of these": alike,
}
"""How they differ -> what is then equal, the narrowest first."""


def _warning(kind: str, pairs: list[tuple[str, str]], counts: Mapping[str, int]) -> Finding | None:
    if not pairs:
        return None
    shown = ", ".join(f"{a!a} ({counts[a]:,} rows) and {b!a} ({counts[b]:,})" for a, b in pairs[:SHOWN])
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    evidence = f"Labels that differ only {kind} are separate classes: {shown}{more}."
    return Finding("labels_alike", "warning", evidence, (_FIX,), numbers={"pairs": [list(p) for p in pairs[:SHOWN]]})


def _blank(names: list[str], counts: Mapping[str, int]) -> Finding | None:
    if not names:
        return None
    shown = ", ".join(f"{name!a} ({counts[name]:,} rows)" for name in names[:SHOWN])
    fix = "Write the label in, remove the rows, or give it a name with --label_names."
    return Finding("blank_label", "warning", f"A label is blank: {shown}.", (fix,), numbers={"labels": names[:SHOWN]})
