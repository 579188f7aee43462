"""Rows that cannot be trained on: reported all at once with their reasons, or left out and listed with `skip_bad_rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tunesmith.data.columns import Columns, has_label, label_parts
from tunesmith.data.csv_files import SHOWN
from tunesmith.data.label_values import (
    NUMBER,
    class_names,
    is_list_type,
    is_string_type,
    label_cells,
    survey_labels,
)
from tunesmith.data.source import BAD_COLUMN, Source
from tunesmith.errors import DataError
from tunesmith.labels import Task

TEXT_PLACEHOLDERS = frozenset(["n/a", "nan", "#n/a", "null", "(null)", "<na>"])
"""Texts that programs write for a missing value. They are text, as people also write them, but are reported."""
MISSING_WORDS = frozenset(["n/a", "na", "nan", "#n/a", "n.a.", "null", "(null)", "-", "--", "?", "<na>", "nil"])
"""Words that spreadsheets write for a missing value."""


class Reason(NamedTuple):
    """Why a row is bad; `word` is its label, if that may be a word for a missing value."""

    column: str
    problem: str
    word: str | None = None

    def __str__(self) -> str:
        return f"{self.column}: {self.problem}" if self.column else self.problem


Reasons = dict[int, list[Reason]]
"""By row."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out: its place, the reasons, and its cells."""

    where: str
    reasons: tuple[str, ...]
    cells: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {"where": self.where, "reasons": list(self.reasons), "row": self.cells}


def sort_out(
    sources: Mapping[str, Source],
    columns: Columns,
    notes: list[str],
    label_names: Sequence[str] | None,
    *,
    allow_empty_text: bool,
    skip: bool,
) -> tuple[dict[str, Source], list[BadRow]]:
    """The sources without their bad rows, and those rows; their number goes to `notes`. Without `skip` they are an error."""
    kept: dict[str, Source] = {}
    bad: list[BadRow] = []
    named = tuple(label_names or ())
    for split, source in sources.items():
        if split.startswith("test") and _is_unlabelled(source, columns.label, named):
            source = source.with_rows(source.dataset.remove_columns([columns.label]))
        found = _text_reasons(source, columns.text, allow_empty_text=allow_empty_text)
        placeholders = _placeholders(source, columns.text) if not allow_empty_text else {}
        if placeholders and not skip:
            words = sorted({reason.word or "" for reasons in placeholders.values() for reason in reasons})
            notes.append(
                f"Warning: {len(placeholders):,} {split} texts are only {' or '.join(map(repr, words))} (first: "
                f"{source.where(min(placeholders))}). They are used as text; --skip_bad_rows skips them."
            )
        elif skip:
            found |= {row: [*found.get(row, []), *reasons] for row, reasons in placeholders.items()}
        if columns.label is not None and has_label(source, columns.label):
            _add_label_reasons(found, source, columns.label, columns.task, named)
        kept[split] = source
        if BAD_COLUMN in source.dataset.column_names:
            found |= _unread_reasons(source)
            kept[split] = replace(source, dataset=source.dataset.remove_columns([BAD_COLUMN]))
        if found and not skip:
            _refuse(source, found)
        elif found:
            kept[split] = _without(kept[split], found)
            rows, names = source.dataset.with_format(None), source.column_names
            for row in sorted(found):
                cells = {name: rows[row][name] for name in names}
                bad.append(BadRow(source.where(row), tuple(map(str, found[row])), cells))
            notes.append(
                f"{len(found):,} of {source.dataset.num_rows:,} {split} rows were skipped: see bad_rows.jsonl."
            )
    return kept, bad


def _is_missing_word(name: str) -> bool:
    return name.strip().lower() in MISSING_WORDS


def _is_unlabelled(source: Source, label: str | None, label_names: Sequence[str]) -> bool:
    """Whether the label column exists and all of its cells are empty or words for a missing value."""
    if label is None or label not in source.column_names or is_list_type(source.type_of(label)):
        return False
    return all(_is_missing_word(name) and name not in label_names for name in survey_labels(source, label).counts)


def check_texts(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> None:
    """Refuses a missing text, and one that is empty or only spaces unless that is allowed; each text of a pair counts."""
    found = _text_reasons(source, text, allow_empty_text=allow_empty_text)
    if found:
        _refuse_text(source, min(found), found[min(found)][0])


def _unread_reasons(source: Source) -> Reasons:
    """Rows that could not be parsed. Their cells are empty, which does not count as another reason."""
    scanned = ((start, table.column(BAD_COLUMN).to_pylist()) for start, table in source.scan([BAD_COLUMN]))
    return {
        start + row: [Reason("", why)] for start, cells in scanned for row, why in enumerate(cells) if why is not None
    }


def _text_reasons(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> Reasons:
    import pyarrow.compute as pc

    found: Reasons = {}
    for start, table in source.scan(list(text)):
        for name in text:
            cells = table.column(name).combine_chunks()
            _mark(found, start, pc.is_null(cells), Reason(name, "the text is missing"))
            if not allow_empty_text:
                empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(cells)), 0)
                _mark(found, start, empty, Reason(name, "the text is empty"))
    return found


def _placeholders(source: Source, text: Sequence[str]) -> Reasons:
    import pyarrow as pa
    import pyarrow.compute as pc

    found: Reasons = {}
    words = pa.array(sorted(TEXT_PLACEHOLDERS))
    for start, table in source.scan(list(text)):
        for name in text:
            cells = pc.utf8_lower(pc.utf8_trim_whitespace(table.column(name).combine_chunks())).cast(pa.string())
            for word in pc.unique(cells.filter(pc.is_in(cells, value_set=words))).to_pylist():
                _mark(found, start, pc.equal(cells, word), Reason(name, f"the text is {word!r}", word))
    return found


def _add_label_reasons(found: Reasons, source: Source, label: str, task: Task, label_names: Sequence[str]) -> None:
    import pyarrow.compute as pc

    if label_parts(source, label) or class_names(source, label) or task is Task.MULTILABEL:
        return
    kind = source.type_of(label)
    if is_list_type(kind):
        return
    missing = Reason(label, "the label is missing")
    for start, table in source.scan([label]):
        cells = label_cells(table.column(label))
        if not is_string_type(kind):
            _mark(found, start, pc.is_null(cells, nan_is_null=True), missing)
            continue
        blank = pc.or_(pc.is_null(cells), pc.fill_null(pc.equal(cells, ""), False))
        _mark(found, start, blank, missing)
        if task is Task.REGRESSION:
            number = pc.match_substring_regex(cells, NUMBER)
            _mark(found, start, pc.and_(pc.invert(number), pc.invert(blank)), Reason(label, "not a number"))
            continue
        for value in pc.unique(cells.drop_null()).to_pylist():
            if _is_missing_word(value) and value not in label_names:
                _mark(found, start, pc.equal(cells, value), Reason(label, f"the label is {value!r}", value))


def _mark(found: Reasons, start: int, bad: Any, reason: Reason) -> None:
    """Adds a reason to all rows for which the Arrow array `bad` is true; null counts as false."""
    for row in np.flatnonzero(bad.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
        found.setdefault(start + row, []).append(reason)


def _refuse(source: Source, found: Reasons) -> None:
    """Lists several bad rows, or words for a missing value. A single missing label is refused where labels are encoded."""
    words = sorted({reason.word for reasons in found.values() for reason in reasons if reason.word is not None})
    if len(found) == 1 and not words:
        [(row, reasons)] = found.items()
        if reasons[0].problem.startswith("the text is "):
            _refuse_text(source, row, reasons[0])
        return
    lines = [f"  {source.where(row)}: {', '.join(map(str, found[row]))}" for row in sorted(found)[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN:,} more")
    what = "\n".join([f"{len(found):,} of {source.dataset.num_rows:,} {source.name} rows cannot be used:", *lines])
    fix = "Correct them, or set --skip_bad_rows to skip them (bad_rows.jsonl in the run folder lists them)."
    if words:
        fix += f" If {' and '.join(map(repr, words))} is a class, list all classes in --label_names."
    raise DataError(what, where=source.origin, fix=f"\n{fix}")


def _refuse_text(source: Source, row: int, reason: Reason) -> NoReturn:
    fix = "Fill it in or remove the row"
    fix += "; --allow_empty_text keeps it." if reason.problem.endswith("empty") else "."
    raise DataError(reason.problem, where=source.where(row, reason.column), fix=fix)


def _without(source: Source, found: Reasons) -> Source:
    from datasets import Dataset

    good = np.setdiff1d(np.arange(source.dataset.num_rows), np.fromiter(found, dtype=np.int64))
    if not len(good):
        raise DataError(f"all {len(found):,} {source.name} rows are bad", where=source.origin)
    table = source.dataset.with_format("arrow")[:]
    return source.with_rows(Dataset(table.take(good), info=source.dataset.info))
