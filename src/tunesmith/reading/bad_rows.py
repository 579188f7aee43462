"""Rows that cannot be trained on: all of them at once with their reasons, or left out and listed when that is asked for; and
corrected labels from a review file of `tunesmith audit`, which replace those in the data.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tunesmith.errors import DataError, did_you_mean
from tunesmith.files import BadFile, read_plain
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.column_profile import is_missing_word
from tunesmith.reading.columns import Columns, has_label, label_parts
from tunesmith.reading.label_survey import (
    NUMBER,
    class_names,
    is_list_type,
    label_cells,
    plain_numbers,
    style_of_numbers,
    survey_labels,
)
from tunesmith.reading.ready_commands import train_with
from tunesmith.reading.source import BAD_COLUMN, Part, Source
from tunesmith.reading.text_files import SHOWN

Reasons = dict[int, list[str]]


@dataclass(frozen=True)
class BadRow:
    """A row that was left out: where it stands, why, and what it holds."""

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
    *,
    label_names: Sequence[str] | None,
    allow_empty_text: bool,
    skip: bool,
) -> tuple[dict[str, Source], list[BadRow]]:
    """The sources without their bad rows, and those rows; their number goes to `notes`. Without `skip` they are an error."""
    kept: dict[str, Source] = {}
    bad: list[BadRow] = []
    for split, source in sources.items():
        if split.startswith("test") and _is_unlabelled(source, columns.label, label_names or ()):
            source = replace(source, dataset=source.dataset.remove_columns([columns.label]), table_file=None)
        found = _text_reasons(source, columns.text, allow_empty_text=allow_empty_text)
        if columns.label is not None and has_label(source, columns.label):
            _add_label_reasons(found, source, columns, label_names)
        kept[split] = source
        if BAD_COLUMN in source.dataset.column_names:
            found |= _unread_reasons(source)
            kept[split] = replace(source, dataset=source.dataset.remove_columns([BAD_COLUMN]))
        if found and not skip:
            _refuse(source, found)
        elif found:
            kept[split] = _without(kept[split], found)
            bad += _describe(source, found)
            notes.append(f"{len(found):,} of {source.dataset.num_rows:,} {split} rows were left out: bad_rows.jsonl.")
    return kept, bad


def _is_unlabelled(source: Source, label: str | None, label_names: Sequence[str]) -> bool:
    """Whether the label column is there and holds nothing, or words for nothing."""
    kinds = source.dataset.features.arrow_schema
    if label is None or label not in source.column_names or is_list_type(kinds.field(label).type):
        return False
    return all(is_missing_word(name) and name not in label_names for name in survey_labels(source, label).counts)


def check_texts(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> None:
    """Refuses a missing text, and one that is empty or only spaces unless that is allowed; each text of a pair counts."""
    found = _text_reasons(source, text, allow_empty_text=allow_empty_text)
    if found:
        _refuse_text(source, min(found), found[min(found)][0])


def _unread_reasons(source: Source) -> Reasons:
    """Rows that the reader could not take apart; their cells are empty, which is not a further reason."""
    scanned = ((start, table.column(BAD_COLUMN).to_pylist()) for start, table in source.scan([BAD_COLUMN]))
    return {start + row: [why] for start, cells in scanned for row, why in enumerate(cells) if why is not None}


def _text_reasons(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> Reasons:
    import pyarrow.compute as pc

    found: Reasons = {}
    for start, table in source.scan(list(text)):
        for name in text:
            cells = table.column(name).combine_chunks()
            _mark(found, start, pc.is_null(cells), f"{name}: the text is missing")
            if not allow_empty_text:
                empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(cells)), 0)
                _mark(found, start, pc.fill_null(empty, False), f"{name}: the text is empty")
    return found


def _add_label_reasons(found: Reasons, source: Source, columns: Columns, label_names: Sequence[str] | None) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    label = columns.label or ""
    if label_parts(source, label) or class_names(source, label) or columns.task is Task.MULTILABEL:
        return
    kind = source.dataset.features.arrow_schema.field(label).type
    if is_list_type(kind):
        return
    style = style_of_numbers(source, label) if columns.task is Task.REGRESSION else None
    for start, table in source.scan([label]):
        cells = label_cells(table.column(label))
        if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
            nan = pc.is_nan(cells) if pa.types.is_floating(kind) else pa.array(np.zeros(len(cells), bool))
            _mark(found, start, pc.or_(pc.is_null(cells), pc.fill_null(nan, False)), f"{label}: the label is missing")
            continue
        blank = pc.or_(pc.is_null(cells), pc.fill_null(pc.equal(cells, ""), False))
        _mark(found, start, blank, f"{label}: the label is missing")
        if columns.task is Task.REGRESSION:
            number = pc.match_substring_regex(plain_numbers(cells, style), NUMBER)
            wrong = pc.and_(pc.invert(pc.fill_null(number, True)), pc.invert(blank))
            _mark(found, start, wrong, f"{label}: not a number")
            continue
        for value in pc.unique(cells.drop_null()).to_pylist():
            if is_missing_word(value) and value not in (label_names or ()):
                _mark(found, start, pc.fill_null(pc.equal(cells, value), False), f"{label}: the label is {value!r}")


def _mark(found: Reasons, start: int, bad: Any, reason: str) -> None:
    for row in np.flatnonzero(bad.to_numpy(zero_copy_only=False)).tolist():
        found.setdefault(start + row, []).append(reason)


def _refuse(source: Source, found: Reasons) -> None:
    """One missing label is refused where labels are encoded; several bad rows, or a word for nothing, are listed here."""
    words = sorted({r.rpartition("the label is ")[2].strip("'") for rs in found.values() for r in rs if " is '" in r})
    if len(found) == 1 and not words:
        [(row, reasons)] = found.items()
        if ": the text is " in reasons[0]:
            _refuse_text(source, row, reasons[0])
        return
    lines = [f"  {source.where(row)}: {', '.join(found[row])}" for row in sorted(found)[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN:,} more")
    what = "\n".join([f"{len(found):,} of {source.dataset.num_rows:,} {source.name} rows cannot be used:", *lines])
    skip = train_with(source.origin, "--skip_bad_rows")
    fix = f"Correct them, or leave them out (they are written to bad_rows.jsonl of the run): {skip}"
    if words:
        fix += f". If {' and '.join(map(repr, words))} is a class of its own, list all classes in --label_names"
    raise DataError(what, where=source.origin, fix=f"\n{fix}")


def _refuse_text(source: Source, row: int, reason: str) -> NoReturn:
    column, _, problem = reason.rpartition(": ")
    fix = "Fill it in or remove the row" + ("; --allow_empty_text keeps it." if problem.endswith("empty") else ".")
    raise DataError(problem, where=source.where(row, column), fix=fix)


def _without(source: Source, found: Reasons) -> Source:
    from datasets import Dataset

    good = np.setdiff1d(np.arange(source.dataset.num_rows), np.fromiter(found, dtype=np.int64))
    if not len(good):
        raise DataError(f"all {len(found):,} {source.name} rows are bad", where=source.origin)
    table = source.dataset.with_format("arrow")[:]
    return replace(source, dataset=Dataset(table.take(good), info=source.dataset.info), table_file=None)


def _describe(source: Source, found: Reasons) -> list[BadRow]:
    rows = source.dataset.with_format(None)
    names = source.column_names
    return [BadRow(source.where(r), tuple(found[r]), {k: rows[r][k] for k in names}) for r in sorted(found)]


MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Correction:
    """The label of one row; `line` is its line in the review file."""

    row: int
    texts: tuple[str, ...]
    label: str
    line: int


def read_corrections(path: Path, columns: Sequence[str]) -> list[Correction]:
    """The rows of a review file: `row`, the text columns, `label`. Other columns are for the reader."""
    try:
        text = read_plain(path, MOST_BYTES, follow=True).decode("utf-8-sig")
    except (OSError, BadFile, UnicodeDecodeError) as error:
        raise DataError(f"the labels file cannot be read: {error}", where=str(path)) from None
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    missing = [name for name in ("row", *columns, "label") if name not in (table.fieldnames or ())]
    if missing:
        fix = "Use a file that `tunesmith audit --review_file` wrote for this data."
        raise DataError(f"the column {missing[0]!r} is missing", where=str(path), fix=fix)
    found = []
    for cells in table:
        where = f"{path}:{table.line_num}"
        number = cells["row"] or ""
        if not number.isdecimal() or int(number) < 1:
            raise DataError(f"{number!r} is not a row number", where=f"{where}:row", fix="Rows count from 1.")
        texts = tuple(cells[name] or "" for name in columns)
        found.append(Correction(int(number) - 1, texts, (cells["label"] or "").strip(), table.line_num))
    return found


def correct_labels(part: Part, path: Path, columns: Sequence[str], labels: LabelMap) -> tuple[Part, int]:
    """The part with the labels of the file, and how many differ. A row whose text is another one is refused."""
    if labels.task is Task.MULTILABEL:
        raise DataError("a labels file holds one label a row; these rows have several", where=str(path))
    values = part.encoded.with_format("numpy", columns=["labels"])[:]["labels"].copy()
    cells = part.source.dataset.select_columns(list(columns))
    changed = 0
    for one in read_corrections(path, columns):
        where = f"{path}:{one.line}"
        if one.row >= len(values):
            raise DataError(f"row {one.row + 1}: the data has {len(values):,} rows", where=where)
        if tuple(str(cell) for cell in cells[one.row].values()) != one.texts:
            fix = "Audit the data as it is now, and correct the new file."
            raise DataError(f"row {one.row + 1} has another text in the data", where=where, fix=fix)
        value = _value(one, labels, where)
        changed += bool(values[one.row] != np.asarray(value, dtype=values.dtype))
        values[one.row] = value
    feature = part.encoded.features["labels"]
    encoded = part.encoded.remove_columns(["labels"]).add_column("labels", values, feature=feature)
    return replace(part, encoded=encoded), changed


def _value(one: Correction, labels: LabelMap, where: str) -> float:
    if labels.task is Task.REGRESSION:
        try:
            number = float(one.label)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{one.label!r} is not a number", where=f"{where}:label")
        return number
    if one.label not in labels.names:
        fix = did_you_mean(one.label, labels.names) or "Write one of the labels of the data."
        raise DataError(f"{one.label!r} is not one of {', '.join(labels.names[:8])}", where=f"{where}:label", fix=fix)
    return labels.names.index(one.label)
