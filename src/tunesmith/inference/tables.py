"""Logits as probabilities and label names, and predictions as csv, tsv, jsonl or parquet with all input columns, in input order.

Spreadsheets run a cell that begins with = + - @ (also full-width), a tab or a line break as a formula. In csv and tsv such a
cell gets a leading apostrophe. A cell that already looks escaped gets one more, so the text can be restored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt

from tunesmith.errors import ConfigError, DataError, NumericsError, first_few
from tunesmith.files import TMP_PREFIX, make_folder, replacing
from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.metrics.table import sigmoid, softmax
from tunesmith.runs.folder import remove_tree

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
_DANGEROUS = re.compile(r"^'*[=+\-@＝＋－＠\t\r\n]")
_NEEDS_QUOTES = re.compile('[",\t\r\n\ufeff]|^ | $')
"""Every character that some reader of csv or tsv interprets, whatever the separator is."""


def escape_formula(text: str) -> str:
    """Prefix the text with an apostrophe if a spreadsheet would run it as a formula."""
    return f"'{text}" if _DANGEROUS.match(text) else text


def check_format(path: Path) -> None:
    """Raise a ConfigError for a file type that cannot be written."""
    if path.suffix not in FORMATS:
        fix = f"Use {', '.join(FORMATS)}."
        raise ConfigError(f"cannot write {path.suffix or 'a file without a type'}", where=str(path), fix=fix)


def check_cells(path: Path | None, columns: Mapping[str, Sequence[Any]]) -> None:
    """Raise a DataError for a NUL character in csv or tsv, which readers truncate or refuse. No path means csv."""
    if path is not None and path.suffix not in (".csv", ".tsv"):
        return
    for name, values in columns.items():
        for row, value in enumerate(values, start=1):
            if "\0" in name or (isinstance(value, str) and "\0" in value):
                problem = f"column {name!r} contains a NUL character, which csv and tsv do not support"
                raise DataError(problem, where=f"row {row}", fix="Write .jsonl or .parquet.")


def remove_leftovers(target: Path) -> None:
    """Remove temporary files and folders for `target` whose process was killed; restore `target` if it was moved aside."""
    pattern = re.compile(rf"{re.escape(TMP_PREFIX)}(old-|gone-)?{re.escape(target.name)}-(\d+)")
    for path in target.parent.glob(f"{TMP_PREFIX}*"):
        found = pattern.fullmatch(path.name)
        if found is None or (int(found[2]) != os.getpid() and Path(f"/proc/{found[2]}").exists()):
            continue
        if found[1] == "old-" and not os.path.lexists(target):
            path.rename(target)
        else:
            remove_tree(path)


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns, complete or not at all."""
    check_format(path)
    check_cells(path, columns)
    make_folder(path.parent)
    remove_leftovers(path)
    with replacing(path) as out:
        fill_table(out, path.suffix, columns)


def fill_table(out: BinaryIO, suffix: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns into an open file, in the format of the suffix."""
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), out)
        return
    text = TextIOWrapper(out, encoding="utf-8", newline="")
    if suffix == ".jsonl":
        for row in zip(*columns.values(), strict=True):
            text.write(json.dumps(dict(zip(columns, map(_plain, row), strict=True)), ensure_ascii=False) + "\n")
    else:
        write_delimited(text, columns, "\t" if suffix == ".tsv" else ",")
    text.detach()


def write_delimited(out: TextIO, columns: Mapping[str, Sequence[Any]], delimiter: str) -> None:
    """Write csv or tsv text. Every cell that a reader could interpret is quoted, in tsv too."""
    for row in chain([tuple(columns)], zip(*columns.values(), strict=True)):
        cells = [_cell(value) for value in row]
        out.write((delimiter.join(cells) if cells != [""] else '""') + "\n")  # some readers skip an empty line


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


def list_answers(labels: LabelMap, top_k: int | None = None) -> list[str]:
    """Return the names of the added columns: prediction, and prob_NAME per label or the `top_k` best labels."""
    if labels.task is Task.REGRESSION:
        return ["prediction"]
    answered = ["answered"] if labels.abstention is not None else []
    if top_k is not None:
        places = range(1, min(top_k, len(labels)) + 1)
        return ["prediction", *answered, *(f"{what}_{place}" for place in places for what in ("label", "prob"))]
    return ["prediction", *answered, *(f"prob_{name}" for name in labels.names)]


def choose_column_names(ours: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Return a free name for each of our columns: NAME, tunesmith_NAME, or tunesmith_NAME with a number."""
    used = set(taken)
    chosen = []
    for name in ours:
        candidates = chain((name, f"tunesmith_{name}"), (f"tunesmith_{name}_{n}" for n in count(2)))
        found = next(candidate for candidate in candidates if candidate not in used)
        used.add(found)
        chosen.append(found)
    return chosen


def names_of_run(text: Sequence[str], labels: LabelMap) -> dict[str, str]:
    """Map our columns of predictions.parquet to names that differ from the text columns."""
    ours = ["split", "row", "file", "line", "label", *list_answers(labels), "truncated"]
    return dict(zip(ours, choose_column_names(ours, text), strict=True))


def describe_renaming(ours: Iterable[str], chosen: Iterable[str]) -> str | None:
    """Return one line if a column was renamed, else None."""
    moved = [f"{new!r} instead of {old!r}" for old, new in zip(ours, chosen, strict=True) if old != new]
    return f"The data already has columns with these names: predictions use {first_few(moved, 6)}." if moved else None


def probabilities_of(logits: npt.NDArray[Any], task: Task) -> npt.NDArray[np.float64]:
    """Return the softmax over classes, the sigmoid of each multilabel logit, or the value itself for regression."""
    values = np.asarray(logits, dtype=np.float64)
    if task is Task.REGRESSION:
        return values
    return sigmoid(values) if task is Task.MULTILABEL else softmax(values)


def predicted_names(probabilities: npt.NDArray[Any], labels: LabelMap) -> list[Any]:
    """Return the predicted label name of each row (multilabel: a list of names, regression: a number)."""
    require_numbers(probabilities)
    if labels.task is Task.REGRESSION:
        return [float(v) for v in probabilities.ravel()]
    chosen = choose_labels(probabilities, labels.task, labels.thresholds)
    if labels.task is Task.MULTILABEL:
        return [[labels.names[i] for i in np.flatnonzero(row)] for row in chosen]
    return [labels.names[i] for i in chosen]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted label of one example, with the probability of each label (empty for regression)."""

    label: Any
    probabilities: dict[str, float]
    answered: bool | None = None
    """Whether the confidence reaches the threshold of `Predictor.abstaining`; None if the model doesn't abstain."""

    def best(self, top_k: int | None = None) -> list[tuple[str, float]]:
        """Return (label name, probability), the most probable first, at most `top_k`."""
        return sorted(self.probabilities.items(), key=lambda pair: -pair[1])[:top_k]


def make_predictions(probabilities: npt.NDArray[Any], labels: LabelMap) -> list[Prediction]:
    """Return one prediction per row of probabilities."""
    names = () if labels.task is Task.REGRESSION else labels.names
    answered = answered_rows(probabilities, labels)
    rows = zip(predicted_names(probabilities, labels), probabilities.tolist(), answered, strict=True)
    return [Prediction(label, dict(zip(names, row, strict=False)), sure) for label, row, sure in rows]


def answered_rows(probabilities: npt.NDArray[Any], labels: LabelMap) -> list[bool | None]:
    """Return which rows are answered; None for all of them if the model doesn't abstain."""
    if labels.abstention is None:
        return [None] * len(probabilities)
    predicted = choose_labels(probabilities, labels.task, labels.thresholds)
    found: list[bool | None] = labels.abstention.answers(probabilities, predicted).tolist()
    return found


def answer_columns(probabilities: npt.NDArray[Any], labels: LabelMap, top_k: int | None = None) -> list[list[Any]]:
    """Return the values of the columns of `list_answers`."""
    names: list[list[Any]] = [predicted_names(probabilities, labels)]
    if labels.task is Task.REGRESSION:
        return names
    if labels.abstention is not None:
        names.append(answered_rows(probabilities, labels))
    if top_k is None:
        return [*names, *probabilities.T.tolist()]
    best = [one.best(top_k) for one in make_predictions(probabilities, labels)]
    places = range(min(top_k, len(labels)))
    return [*names, *([row[place][side] for row in best] for place in places for side in (0, 1))]


def require_numbers(answers: npt.NDArray[Any], *, before: int = 0) -> None:
    """Raise a NumericsError that names the first row with a NaN or infinite value."""
    bad = np.flatnonzero(~np.isfinite(answers).all(axis=tuple(range(1, answers.ndim))))
    if len(bad):
        problem = (
            f"the prediction for row {before + int(bad[0]) + 1} is NaN or inf ({len(bad):,} of {len(answers):,} rows)"
        )
        fix = "Check the weights with `tunesmith doctor`, or predict without --bf16."
        raise NumericsError(problem, fix=fix)
