"""Predictions of two runs, matched row by row. Rows that are not the same are refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.report.predictions import make_predictions, own_columns

Key = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One run's labelled rows of one split. `given` is what a metric takes: probabilities, ids or values."""

    task: Task
    names: tuple[str, ...]
    keys: list[Key]
    labels: NDArray[Any]
    given: NDArray[Any]
    """(rows, classes) probabilities, or ids or values by row."""
    decided: NDArray[Any]
    """The labels that the run gave, by its thresholds where it moved them."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two sets of predictions and one set of labels, row by row."""

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
    """Splits with at least one labelled row; test comes first, since validation rows have chosen the checkpoint."""
    labels = columns.get("label", [])
    splits = [str(s) for s in columns.get("split", ["predictions"] * len(labels))]
    found = dict.fromkeys(s for s, label in zip(splits, labels, strict=True) if label is not None)
    return sorted(found, key=lambda s: {"test": 0, "validation": 1}.get(s, 2))


def read_side(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any], split: str) -> Side | None:
    """The labelled rows of a split; None when there are none."""
    own = own_columns(columns, summary)
    every = own.get("split", [split] * len(own.get("label", [])))
    inside = [k for k, s in enumerate(every) if str(s) == split]
    part = {name: [values[k] for k in inside] for name, values in columns.items()}
    found = make_predictions(part, summary)
    if found is None:
        return None
    given = found.predicted if found.probabilities is None else found.probabilities
    texts = list(zip(*found.texts.values(), strict=True)) if found.texts else [()] * len(found)
    keys = [(int(row), tuple(text)) for row, text in zip(found.row, texts, strict=True)]
    return Side(found.task, found.names, keys, found.labels, given, found.predicted)


def pair_sides(a: Side, b: Side, *, split: str) -> Pair:
    """The rows of both in the order of A. A DataError says how the rows, labels or tasks differ."""
    if a.task is not b.task or set(a.names) != set(b.names):
        raise DataError(
            f"one run predicts {_say(a)}, the other {_say(b)}", fix="Only runs of one task can be compared row by row."
        )
    where = {key: k for k, key in enumerate(b.keys)}
    missing = sum(key not in where for key in a.keys)
    extra = len(b.keys) - (len(a.keys) - missing)
    if missing or extra or len(where) != len(b.keys):
        raise DataError(
            f"the {split} rows differ: {missing} of {len(a.keys)} rows are not in the other run, which has {extra} others",
            fix="Score both on one file with `tunesmith evaluate`, or train both on the same split.",
        )
    order = np.array([where[key] for key in a.keys], dtype=np.int64)
    labels, given, decided = b.labels[order], b.given[order], b.decided[order]
    if a.names != b.names:  # the same names under other ids
        decided = _renamed(labels, decided, a, b)[1]
        labels, given = _renamed(labels, given, a, b)
    different = int((labels != a.labels).reshape(len(order), -1).any(axis=1).sum())
    if different:
        raise DataError(
            f"{different} of {len(order)} {split} rows have another label in the other run",
            fix="Train both on the same labels.",
        )
    # Both as probabilities, or both as decisions when one run kept no probabilities.
    kind = (a.given, given) if a.given.ndim == given.ndim or a.task is Task.REGRESSION else (a.decided, decided)
    return Pair(a.task, *kind, a.labels, (a.decided, decided))


def _renamed(labels: NDArray[Any], given: NDArray[Any], a: Side, b: Side) -> tuple[NDArray[Any], NDArray[Any]]:
    if a.task is Task.MULTILABEL:
        columns = [b.names.index(name) for name in a.names]
        return labels[:, columns], given[:, columns]
    ids = np.array([a.names.index(name) for name in b.names], dtype=np.int64)
    if given.ndim == 2:
        return ids[labels], given[:, [b.names.index(name) for name in a.names]]
    return ids[labels], ids[given]


def _say(side: Side) -> str:
    return f"{side.task.value} labels {', '.join(side.names[:6])}" if side.names else side.task.value
