"""What the model gets wrong: labels by themselves, confusions, and the mistakes it was surest of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics.metric_values import confusion_matrix
from tunesmith.metrics.uncertainty import wilson_limits
from tunesmith.report.predictions import PredictedRows

MAX_CLASSES = 40
"""A larger matrix is not readable: the most frequent confusions are listed instead."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row predicted wrong. `confidence` is the probability given to the wrong label, or None."""

    row: int
    texts: tuple[tuple[str, str], ...]
    label: str
    predicted: str
    confidence: float | None


@dataclass(frozen=True, slots=True)
class ConfusedPair:
    """One label taken for another: rows, their share of the rows with the true label, and the one it was surest of."""

    true: str
    predicted: str
    rows: int
    share: float
    example: Mistake


@dataclass(frozen=True, slots=True)
class Confusion:
    """`counts[true][predicted]`, empty beyond `MAX_CLASSES`; `pairs` lists the most frequent confusions."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    pairs: tuple[ConfusedPair, ...]


@dataclass(frozen=True, slots=True)
class LabelCount:
    """One label by itself: rows that have it, of these found, rows given it wrongly; `low` and `high` are limits of its F1."""

    name: str
    rows: int
    found: int
    extra: int
    low: float
    high: float

    @property
    def precision(self) -> float | None:
        """The share of right ones among those given; None when it was never given."""
        return self.found / (self.found + self.extra) if self.found + self.extra else None

    @property
    def recall(self) -> float | None:
        """The share found among those that have it; None when no row has it."""
        return self.found / self.rows if self.rows else None

    @property
    def f1(self) -> float | None:
        """The harmonic mean of both; None when no row has the label and none was given it."""
        return 2 * self.found / (self.rows + self.found + self.extra) if self.rows + self.extra else None


def count_labels(predictions: PredictedRows) -> list[LabelCount]:
    """Each label by itself, the lowest F1 first, labels without rows last; [] in regression."""
    if predictions.task is Task.REGRESSION:
        return []
    ids = np.arange(len(predictions.names))
    several = predictions.task is Task.MULTILABEL
    true, given = (v == 1 if several else v[:, None] == ids for v in (predictions.labels, predictions.predicted))
    rows, found, extra = true.sum(axis=0), (true & given).sum(axis=0), (given & ~true).sum(axis=0)
    # As `f1_limits` does: J = found / (rows + extra) is a share, and F1 = 2J / (1+J).
    low, high = wilson_limits(found / np.maximum(1, rows + extra), np.maximum(1, rows + extra))
    columns = (column.tolist() for column in (rows, found, extra, 2 * low / (1 + low), 2 * high / (1 + high)))
    counts = [LabelCount(*one) for one in zip(predictions.names, *columns, strict=True)]
    return sorted(counts, key=lambda one: (not one.rows, one.f1 or 0.0, -one.rows))


def count_confusions(predictions: PredictedRows, *, most: int = 12) -> Confusion | None:
    """The matrix over the label names; None in regression and where a row may have several labels."""
    if predictions.task in (Task.REGRESSION, Task.MULTILABEL) or not len(predictions):
        return None
    inside, names = predictions.predicted >= 0, predictions.names
    table = confusion_matrix(predictions.labels[inside], predictions.predicted[inside], num_classes=len(names)).astype(
        int
    )
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [divmod(int(k), len(names)) for k in order if wrong.flat[k]]
    found = tuple(
        ConfusedPair(names[a], names[b], int(wrong[a, b]), wrong[a, b] / table[a].sum(), _surest(predictions, a, b))
        for a, b in pairs
    )
    counts = tuple(tuple(int(n) for n in row) for row in table) if len(table) <= MAX_CLASSES else ()
    return Confusion(names, counts, found)


def _surest(predictions: PredictedRows, true: int, said: int) -> Mistake:
    """Of the rows of one label taken for another, the one with the highest probability of the wrong label."""
    rows = np.flatnonzero((predictions.labels == true) & (predictions.predicted == said))
    table = predictions.probabilities
    at = int(rows[0] if table is None else rows[np.argmax(table[rows, said])])
    return _mistake(predictions, at, None if table is None else float(table[at, said]))


def find_mistakes(predictions: PredictedRows, *, most: int = 20) -> list[Mistake]:
    """The wrong rows the model was surest of (in regression: the farthest off), surest first; ties in row order."""
    if predictions.task is Task.REGRESSION:
        sure = np.abs(predictions.predicted - predictions.labels)
        order = np.argsort(-sure, kind="stable")[:most]
        return [_mistake(predictions, int(k), None) for k in order]
    wrong = np.flatnonzero(~predictions.right)
    table = predictions.probabilities
    if table is None:
        return [_mistake(predictions, int(k), None) for k in wrong[:most]]
    if (
        predictions.task is Task.MULTILABEL
    ):  # how sure it was of the one label of the row that it was most wrongly sure of
        against = np.where(predictions.labels[wrong] == 1, 1 - table[wrong], table[wrong])
        sure = np.where(predictions.labels[wrong] == predictions.predicted[wrong], 0.0, against).max(axis=1, initial=0)
    else:
        sure = table[wrong, predictions.predicted[wrong]]
    order = np.argsort(-sure, kind="stable")[:most]
    return [_mistake(predictions, int(wrong[k]), float(sure[k])) for k in order]


def _mistake(predictions: PredictedRows, at: int, confidence: float | None) -> Mistake:
    texts = tuple((column, values[at]) for column, values in predictions.texts.items())
    label, predicted = (_name(predictions, values[at]) for values in (predictions.labels, predictions.predicted))
    return Mistake(int(predictions.row[at]), texts, label, predicted, confidence)


def _name(predictions: PredictedRows, value: Any) -> str:
    if predictions.task is Task.REGRESSION:
        return f"{value:.4g}"
    if predictions.task is Task.MULTILABEL:
        return ", ".join(predictions.names[k] for k in np.flatnonzero(value)) or "none"
    return predictions.names[int(value)] if 0 <= int(value) < len(predictions.names) else "?"
