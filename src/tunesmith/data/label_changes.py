"""Labels that are changed before or after they are encoded: spellings of one label merged, and the corrections of a review file
that `tunesmith audit` wrote and a person edited.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.label_survey import alike, is_list_type, survey_labels
from tunesmith.data.source import Part, Source
from tunesmith.errors import DataError, did_you_mean, first_few
from tunesmith.files import BadFile, read_plain
from tunesmith.labels import LabelMap, Task

SHOWN = 4
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
        notes.append(f"Labels that differ only in case, spaces or form are one, as asked: {shown}.")
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
