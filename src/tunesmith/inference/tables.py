"""Answers of a model as values, and predictions as tables: csv, tsv, jsonl or parquet, input columns kept, input order always; an
added column never takes the name of an input column.

A spreadsheet runs a cell that begins with = + - @ (also the full-width ones), a tab or a line break. In csv and tsv such text
gets an apostrophe in front (and text that already looks escaped gets one more), so `read_predictions` gives the exact text
back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt

from tunesmith.errors import ConfigError, DataError, NumericsError, first_few
from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.runs.writing import make_folder, replacing

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
_DANGEROUS = re.compile(r"^'*[=+\-@＝＋－＠\t\r\n]")
_ESCAPED = re.compile(r"^'+[=+\-@＝＋－＠\t\r\n]")
_NEEDS_QUOTES = re.compile('[",\t\r\n\ufeff]|^ | $')
"""Every character that some reader of csv or tsv gives a meaning to, whatever the separator is."""


def escape_formula(text: str) -> str:
    """The text, with an apostrophe in front if a spreadsheet would run it as a formula."""
    return f"'{text}" if _DANGEROUS.match(text) else text


def unescape_formula(text: str) -> str:
    """What `escape_formula` was given."""
    return text[1:] if _ESCAPED.match(text) else text


def check_format(path: Path) -> None:
    """A ConfigError for a file type that cannot be written."""
    if path.suffix not in FORMATS:
        fix = f"Use {', '.join(FORMATS)}."
        raise ConfigError(f"cannot write {path.suffix or 'a file without a type'}", where=str(path), fix=fix)


def check_cells(path: Path | None, columns: Mapping[str, Sequence[Any]]) -> None:
    """A DataError for text that the format of `path` (csv without one) cannot hold: readers cut or refuse a NUL character."""
    if path is not None and path.suffix not in (".csv", ".tsv"):
        return
    for name, values in columns.items():
        for row, value in enumerate(values, start=1):
            if "\0" in name or (isinstance(value, str) and "\0" in value):
                problem = f"column {name!r} holds a NUL character, which csv and tsv cannot hold"
                raise DataError(problem, where=f"row {row}", fix="Write .jsonl or .parquet.")


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes the columns, complete or not at all."""
    check_format(path)
    check_cells(path, columns)
    make_folder(path.parent)
    with replacing(path) as out:
        fill_table(out, path.suffix, columns)


def fill_table(out: BinaryIO, suffix: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes the columns into an open file, in the format of the suffix."""
    if suffix == ".parquet":
        _write_parquet(out, columns)
        return
    text = TextIOWrapper(out, encoding="utf-8", newline="")
    if suffix == ".jsonl":
        _write_jsonl(text, columns)
    else:
        write_delimited(text, columns, "\t" if suffix == ".tsv" else ",")
    text.detach()


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    return zip(*columns.values(), strict=True)


def _write_parquet(out: BinaryIO, columns: Mapping[str, Sequence[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), out)


def _write_jsonl(out: TextIO, columns: Mapping[str, Sequence[Any]]) -> None:
    for row in _rows(columns):
        out.write(json.dumps(dict(zip(columns, map(_plain, row), strict=True)), ensure_ascii=False) + "\n")


def write_delimited(out: TextIO, columns: Mapping[str, Sequence[Any]], delimiter: str) -> None:
    """Writes csv or tsv text. Whatever a reader could give a meaning to is quoted, in tsv too."""
    out.write(_line([str(name) for name in columns], delimiter))
    for row in _rows(columns):
        out.write(_line(row, delimiter))


def _line(values: Sequence[Any], delimiter: str) -> str:
    cells = [_cell(value) for value in values]
    # an empty line is not a record to some readers
    return (delimiter.join(cells) if cells != [""] else '""') + "\n"


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _cell(value: Any) -> str:
    value = _plain(value)
    if value is None:
        return ""
    if isinstance(value, (list, tuple, dict)):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return str(value)
    text = escape_formula(value)
    return '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text


def read_predictions(path: Path) -> dict[str, list[str]]:
    """The columns of a csv or tsv that `write_table` wrote, every cell the exact text that went in."""
    from tunesmith.data.csv_files import Dialect, parse_delimited

    header: list[str] = []
    columns: list[list[str]] = []
    with path.open(encoding="utf-8", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        dialect = Dialect(delimiter, quoting=True, sure=True)
        for records in parse_delimited([file.read()], origin=str(path), dialect=dialect, on_header=header.extend):
            columns = columns or [[] for _ in header]
            for column, values in zip(columns, records.columns, strict=True):
                column += map(unescape_formula, values)
    return dict(zip(map(unescape_formula, header), columns or [[] for _ in header], strict=True))


def list_answers(labels: LabelMap, top_k: int | None = None) -> list[str]:
    """The names of the columns of answers: prediction, and prob_NAME for each label; or the `top_k` best, sorted."""
    if labels.task is Task.REGRESSION:
        return ["prediction"]
    if top_k is not None:
        places = range(1, min(top_k, len(labels)) + 1)
        return ["prediction", *(f"{what}_{place}" for place in places for what in ("label", "prob"))]
    return ["prediction", *(f"prob_{name}" for name in labels.names)]


def choose_column_names(ours: Sequence[str], taken: Iterable[str]) -> list[str]:
    """A name for each of our columns that is not taken, in order: NAME, else tunesmith_NAME, else that with a number."""
    used = set(taken)
    chosen = []
    for name in ours:
        candidates = chain((name, f"tunesmith_{name}"), (f"tunesmith_{name}_{n}" for n in count(2)))
        found = next(candidate for candidate in candidates if candidate not in used)
        used.add(found)
        chosen.append(found)
    return chosen


def names_of_run(text: Sequence[str], labels: LabelMap) -> dict[str, str]:
    """Our columns of predictions.parquet -> their names beside the text columns of the data."""
    ours = ["split", "row", "label", *list_answers(labels), "truncated"]
    return dict(zip(ours, choose_column_names(ours, text), strict=True))


def describe_renaming(ours: Iterable[str], chosen: Iterable[str]) -> str | None:
    """One line when a name was taken; None when all have their own."""
    moved = [f"{new!r} instead of {old!r}" for old, new in zip(ours, chosen, strict=True) if old != new]
    return f"Columns of the data have names of ours: the predictions use {first_few(moved, 6)}." if moved else None


def probabilities_of(logits: npt.NDArray[Any], task: Task) -> npt.NDArray[np.float64]:
    """Softmax over classes, a sigmoid for each label of a multilabel task, the value itself for regression."""
    values = np.asarray(logits, dtype=np.float64)
    if task is Task.REGRESSION:
        return values
    if task is Task.MULTILABEL:
        return np.where(values >= 0, 1 / (1 + np.exp(-np.abs(values))), 1 - 1 / (1 + np.exp(-np.abs(values))))
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def predicted_names(probabilities: npt.NDArray[Any], labels: LabelMap) -> list[Any]:
    """The predicted label name of each row; a list of names for multilabel, a number for regression."""
    require_numbers(probabilities)
    if labels.task is Task.REGRESSION:
        return [float(v) for v in probabilities.ravel()]
    chosen = choose_labels(probabilities, labels.task, labels.thresholds)
    if labels.task is Task.MULTILABEL:
        return [[labels.names[i] for i in np.flatnonzero(row)] for row in chosen]
    return [labels.names[i] for i in chosen]


def sorted_scores(row: npt.NDArray[Any], labels: LabelMap, top_k: int | None = None) -> list[tuple[str, float]]:
    """(label name, probability), the most probable first; at most `top_k`."""
    order = np.argsort(-row, kind="stable")[:top_k]
    return [(labels.names[i], float(row[i])) for i in order]


def answer_columns(probabilities: npt.NDArray[Any], labels: LabelMap, top_k: int | None = None) -> list[list[Any]]:
    """The values of the columns that `list_answers` names."""
    names = predicted_names(probabilities, labels)
    if labels.task is Task.REGRESSION:
        return [names]
    if top_k is None:
        return [names, *probabilities.T.tolist()]
    best = [sorted_scores(row, labels, top_k) for row in probabilities]
    return [names, *([row[place][side] for row in best] for place in range(min(top_k, len(labels))) for side in (0, 1))]


def require_numbers(answers: npt.NDArray[Any], *, before: int = 0) -> None:
    """A NumericsError that names the first row whose answer is not finite."""
    bad = np.flatnonzero(~np.isfinite(answers).all(axis=tuple(range(1, answers.ndim))))
    if len(bad):
        problem = f"the model's answer for row {before + int(bad[0]) + 1} is not a number ({len(bad):,} of {len(answers):,} rows)"
        fix = "Look for weights that are not finite (tunesmith doctor), or predict without bf16."
        raise NumericsError(problem, fix=fix)
