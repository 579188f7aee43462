"""predictions.parquet as the report needs it: rows with text, label, prediction and probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.labels import Task

KNOWN = ("row", "index", "idx", "split", "label", "prediction", "truncated", "length", "tokens")
"""Columns with a meaning of their own; the text columns are the others, unless the data summary names them."""
PROBABILITY = "prob_"


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Labelled rows of one split, in row order.

    `labels` and `predicted` are ids into `names`; values in regression; tables of 0 and 1, a column for each name, in
    multilabel tasks.
    """

    split: str
    names: tuple[str, ...]
    task: Task
    row: NDArray[np.int64]
    texts: dict[str, list[str]]
    labels: NDArray[Any]
    predicted: NDArray[Any]
    probabilities: NDArray[np.float64] | None
    truncated: NDArray[np.bool_] | None

    def __len__(self) -> int:
        return len(self.row)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each row's prediction is its label (classification), or the set of its labels."""
        same = np.asarray(self.labels == self.predicted, dtype=bool)
        return np.asarray(same.all(axis=1), dtype=bool) if same.ndim == 2 else same


def make_predictions(
    columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any], *, prefer: Sequence[str] = ("test", "validation")
) -> PredictedRows | None:
    """The rows to explain: those of the first preferred split that has labels, else of the first split that has some.

    Test comes first: validation rows have chosen the checkpoint.
    """
    texts = {c: columns[c] for c in _texts(columns, summary)}
    columns = own_columns(columns, summary)
    if "label" not in columns or "prediction" not in columns or not len(columns["label"]):
        return None
    task = _task(columns, summary)
    names = _names(columns, summary) if task is not Task.REGRESSION else ()
    labels, predicted = (_values(columns[c], names, task) for c in ("label", "prediction"))
    if task is Task.MULTILABEL:
        known = np.array([value is not None for value in columns["label"]])
    else:
        known = np.isfinite(labels) if task is Task.REGRESSION else labels >= 0
    splits = [str(s) for s in columns.get("split", ["predictions"] * len(labels))]
    present = [s for s in dict.fromkeys(splits) if any(k and s == t for k, t in zip(known, splits, strict=True))]
    if not present:
        return None
    split = next((s for s in prefer if s in present), present[0])
    keep = [k for k, (labelled, own) in enumerate(zip(known, splits, strict=True)) if labelled and own == split]
    index = next((columns[c] for c in ("row", "index", "idx") if c in columns), range(len(labels)))
    cut = columns.get("truncated")
    return PredictedRows(
        split=split,
        names=names,
        task=task,
        row=np.array([int(index[k]) for k in keep], dtype=np.int64),
        texts={c: ["" if values[k] is None else str(values[k]) for k in keep] for c, values in texts.items()},
        labels=labels[keep],
        predicted=predicted[keep],
        probabilities=_probabilities(columns, names, keep),
        truncated=None if cut is None else np.array([bool(cut[k]) for k in keep]),
    )


def own_columns(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    """The columns with ours under their usual names, where text columns of the data have taken these."""
    moved = summary.get("prediction_columns")
    if not isinstance(moved, dict):
        return columns
    return {**columns, **{str(own): columns[name] for own, name in moved.items() if name in columns}}


def _task(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> Task:
    told = summary.get("task")
    if told in tuple(Task):
        return Task(told)
    classes = sum(name.startswith(PROBABILITY) for name in columns)
    if classes:
        return Task.BINARY if classes == 2 else Task.MULTICLASS
    return Task.REGRESSION if any(isinstance(v, float) for v in columns["prediction"]) else Task.MULTICLASS


def _names(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> tuple[str, ...]:
    told = summary.get("labels")
    if isinstance(told, (list, tuple)) and told:
        return tuple(str(name) for name in told)
    found = [name.removeprefix(PROBABILITY) for name in columns if name.startswith(PROBABILITY)]
    cells = [v if isinstance(v, (list, tuple)) else [v] for c in ("label", "prediction") for v in columns[c]]
    seen = sorted({str(v) for cell in cells for v in cell if v is not None})
    return tuple(found or seen)


def _values(values: Sequence[Any], names: tuple[str, ...], task: Task) -> NDArray[Any]:
    if task is Task.REGRESSION:
        return np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)
    if task is Task.MULTILABEL:
        sets = [{str(name) for name in value or ()} for value in values]
        return np.array([[int(name in found) for name in names] for found in sets], dtype=np.int64)
    ids = {name: i for i, name in enumerate(names)}
    inside = range(len(names))

    def id_of(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and str(value) not in ids:
            return value if value in inside else -1
        return ids.get(str(value), -1)

    return np.array([id_of(v) for v in values], dtype=np.int64)


def _texts(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> list[str]:
    told = summary.get("columns")
    wanted = told.get("text") if isinstance(told, dict) else None
    if isinstance(wanted, (list, tuple)):
        return [str(c) for c in wanted if c in columns]
    others = [c for c in columns if c not in KNOWN and not c.startswith(PROBABILITY)]
    return [c for c in others if any(isinstance(v, str) for v in columns[c])][:2]


def _probabilities(
    columns: Mapping[str, Sequence[Any]], names: tuple[str, ...], keep: list[int]
) -> NDArray[np.float64] | None:
    wanted = [PROBABILITY + name for name in names]
    if not names or any(c not in columns for c in wanted):
        return None
    table = np.array([[math.nan if v is None else float(v) for v in columns[c]] for c in wanted], dtype=np.float64).T
    kept = table[keep]
    return kept if np.isfinite(kept).all() else None
