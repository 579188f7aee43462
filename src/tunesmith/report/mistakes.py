"""What the model gets wrong: the confusion matrix and the mistakes it was surest of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics.classification import confusion_matrix
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
class Confusion:
    """`counts[true][predicted]`; `pairs` lists the most frequent confusions as (true, predicted, rows)."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class LabelCount:
    """One label of a multilabel task: rows that have it, of these found, and rows that were given it wrongly."""

    name: str
    rows: int
    found: int
    extra: int

    @property
    def precision(self) -> float | None:
        """The share of right ones among those given; None when it was never given."""
        return self.found / (self.found + self.extra) if self.found + self.extra else None

    @property
    def recall(self) -> float | None:
        """The share found among those that have it; None when no row has it."""
        return self.found / self.rows if self.rows else None


def count_labels(predictions: PredictedRows) -> list[LabelCount]:
    """Each label by itself, those most often missed or given wrongly first; [] where a row has one label."""
    if predictions.task is not Task.MULTILABEL:
        return []
    true, given = predictions.labels == 1, predictions.predicted == 1
    columns = zip(predictions.names, true.T, given.T, strict=True)
    counts = [LabelCount(n, int(t.sum()), int((t & g).sum()), int((g & ~t).sum())) for n, t, g in columns]
    return sorted(counts, key=lambda one: -(one.rows - one.found + one.extra))


def count_confusions(predictions: PredictedRows) -> Confusion | None:
    """The matrix over the label names; None in regression and where a row may have several labels."""
    if predictions.task in (Task.REGRESSION, Task.MULTILABEL) or not len(predictions):
        return None
    inside = predictions.predicted >= 0
    table = confusion_matrix(
        predictions.labels[inside], predictions.predicted[inside], num_classes=len(predictions.names)
    ).astype(int)
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:10]
    pairs = [(*divmod(int(k), len(predictions.names)), int(wrong.flat[k])) for k in order if wrong.flat[k]]
    named = tuple((predictions.names[a], predictions.names[b], n) for a, b, n in pairs)
    counts = tuple(tuple(int(n) for n in row) for row in table) if len(table) <= MAX_CLASSES else ()
    return Confusion(predictions.names, counts, named)


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
