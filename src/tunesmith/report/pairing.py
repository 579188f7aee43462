"""Predictions of two runs, matched row by row. Rows that are not the same are refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.report.predictions import PredictedRows, make_predictions, own_columns, split_rank


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two sets of predictions and one set of labels, row by row. `given_a` and `given_b` are what a metric takes:
    probabilities (rows, classes), or ids or values by row; `decided` are the labels that each run gave, by its thresholds."""

    task: Task
    given_a: NDArray[Any]
    given_b: NDArray[Any]
    labels: NDArray[Any]
    decided: tuple[NDArray[Any], NDArray[Any]]

    @property
    def disagreements(self) -> int:
        """Rows that the two decide differently; 0 for regression, where nothing is decided."""
        if self.task is Task.REGRESSION:
            return 0
        a, b = self.decided
        return int((a != b).reshape(len(a), -1).any(axis=1).sum())


def labelled_splits(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Splits with at least one labelled row, in the order to be read."""
    labels = columns.get("label", [])
    splits = [str(s) for s in columns.get("split", ["predictions"] * len(labels))]
    found = dict.fromkeys(s for s, label in zip(splits, labels, strict=True) if label is not None)
    return sorted(found, key=split_rank)


def read_side(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any], split: str) -> PredictedRows | None:
    """The labelled rows of a split; None when there are none."""
    own = own_columns(columns, summary)
    every = own.get("split", [split] * len(own.get("label", [])))
    inside = [k for k, s in enumerate(every) if str(s) == split]
    return make_predictions({name: [values[k] for k in inside] for name, values in columns.items()}, summary)


def pair_sides(a: PredictedRows, b: PredictedRows, *, split: str) -> Pair:
    """The rows of both in the order of A. A DataError says how the rows, labels or tasks differ."""
    if a.task is not b.task or set(a.names) != set(b.names):
        raise DataError(
            f"one run predicts {_say(a)}, the other {_say(b)}", fix="Only runs of one task can be compared row by row."
        )
    keys, others = _keys(a), _keys(b)
    where = {key: k for k, key in enumerate(others)}
    missing = sum(key not in where for key in keys)
    extra = len(others) - (len(keys) - missing)
    if missing or extra or len(where) != len(others):
        raise DataError(
            f"the {split} rows differ: {missing} of {len(keys)} rows are not in the other run, which has {extra} others",
            fix="Score both on one file with `tunesmith evaluate`, or train both on the same split.",
        )
    order = np.array([where[key] for key in keys], dtype=np.int64)
    labels, decided = (_renamed(values[order], a, b) for values in (b.labels, b.predicted))
    different = int((labels != a.labels).reshape(len(order), -1).any(axis=1).sum())
    if different:
        raise DataError(
            f"{different} of {len(order)} {split} rows have another label in the other run",
            fix="Train both on the same labels.",
        )
    # Both as probabilities, or both as decisions when one run kept no probabilities.
    given_a, given_b = a.predicted, decided
    if a.probabilities is not None and b.probabilities is not None:
        given_a, given_b = a.probabilities, b.probabilities[order][:, [b.names.index(name) for name in a.names]]
    return Pair(a.task, given_a, given_b, a.labels, (a.predicted, decided))


def _keys(rows: PredictedRows) -> list[tuple[int, tuple[str, ...]]]:
    """What a row is known by: its number and its texts."""
    texts = list(zip(*rows.texts.values(), strict=True)) if rows.texts else [()] * len(rows)
    return [(int(row), tuple(text)) for row, text in zip(rows.row, texts, strict=True)]


def _renamed(values: NDArray[Any], a: PredictedRows, b: PredictedRows) -> NDArray[Any]:
    """Labels of B by the ids of A: the same names may have other ids."""
    if a.names == b.names:
        return values
    if a.task is Task.MULTILABEL:
        return values[:, [b.names.index(name) for name in a.names]]
    ids: NDArray[Any] = np.array([a.names.index(name) for name in b.names], dtype=np.int64)[values]
    return ids


def _say(rows: PredictedRows) -> str:
    return f"{rows.task.value} labels {', '.join(rows.names[:6])}" if rows.names else rows.task.value
