"""Corrected labels from a review file of `tunesmith audit`, put in the place of those in the data."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.errors import DataError, did_you_mean
from tunesmith.files import BadFile, read_plain
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.part import Part

MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Correction:
    """The label of one row; `line` is where it stands in the review file."""

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
    import numpy as np

    rows = read_corrections(path, columns)
    values = part.encoded.with_format("numpy", columns=["labels"])[:]["labels"].copy()
    cells = part.source.dataset.select_columns(list(columns))
    changed = 0
    for one in rows:
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
