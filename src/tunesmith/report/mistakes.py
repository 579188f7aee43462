"""What the model gets wrong: labels by themselves, confusions, the mistakes it was surest of, and scores of parts of the data.

A part is called worse only if the test is significant after correction for the number of parts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    if predictions.task is Task.MULTILABEL:  # the probability of the label of a row that it was most wrong about
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


MIN_SLICE_ROWS = 10
SIGNIFICANCE = 0.05
MAX_LABELS = 10
MAX_ROWS = 50_000
"""Rows whose words are compared; a seeded sample of a larger set says the same."""
_WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True, slots=True)
class Slice:
    """Accuracy of one part. `worse`: below the rest, tested at 5% divided by the number of parts (Bonferroni)."""

    group: str
    name: str
    rows: int
    accuracy: float
    low: float
    high: float
    worse: bool


def find_slices(predictions: PredictedRows) -> list[Slice]:
    """Slices by label, length, truncation and word overlap of the pair; those under ten rows are left out."""
    groups = [
        *_by_label(predictions),
        *_by_length(predictions),
        *_by_truncation(predictions),
        *_by_overlap(predictions),
    ]
    kept = [(group, name, inside) for group, name, inside in groups if inside.sum() >= MIN_SLICE_ROWS]
    limit = SIGNIFICANCE / max(1, len(kept))
    return [_measure(group, name, inside, predictions.right, limit) for group, name, inside in kept]


def _measure(group: str, name: str, inside: NDArray[np.bool_], right: NDArray[np.bool_], limit: float) -> Slice:
    rows, share = int(inside.sum()), float(right[inside].mean())
    low, high = wilson_limits(share, rows)
    return Slice(group, name, rows, share, float(low), float(high), _p_lower(right, inside) < limit)


def _p_lower(right: NDArray[np.bool_], inside: NDArray[np.bool_]) -> float:
    """One-sided p-value that the part is as good as the rest (two proportions, pooled)."""
    a, b = int(inside.sum()), int((~inside).sum())
    if not a or not b:
        return 1.0
    pooled = float(right.mean())
    error = math.sqrt(pooled * (1 - pooled) * (1 / a + 1 / b))
    if error == 0:
        return 1.0
    return NormalDist().cdf((float(right[inside].mean()) - float(right[~inside].mean())) / error)


RowGroup = tuple[str, str, NDArray[np.bool_]]


def _by_label(predictions: PredictedRows) -> list[RowGroup]:
    """None of many labels: their table says the same."""
    labels, names = predictions.labels, predictions.names
    several = labels.ndim == 2
    return [
        ("true label", name, (labels[:, k] == 1) if several else (labels == k))
        for k, name in enumerate(names if len(names) <= MAX_LABELS else ())
    ]


def _by_length(predictions: PredictedRows) -> list[RowGroup]:
    if not predictions.texts:
        return []
    words = np.zeros(len(predictions))
    for values in predictions.texts.values():
        words += [len(text.split()) for text in values]
    return _quartiles("words", words)


def _by_truncation(predictions: PredictedRows) -> list[RowGroup]:
    cut = predictions.truncated
    if cut is None or not cut.any():
        return []
    return [("truncated", "yes", cut), ("truncated", "no", ~cut)]


def _by_overlap(predictions: PredictedRows) -> list[RowGroup]:
    if len(predictions.texts) != 2 or len(predictions) > MAX_ROWS:
        return []
    first, second = predictions.texts.values()
    shares = np.array([100 * word_overlap(a, b) for a, b in zip(first, second, strict=True)])
    return _quartiles("word overlap of the pair", shares, "%")


def word_overlap(first: str, second: str) -> float:
    """Shared words over all words of a pair (Jaccard), 0 when both are empty."""
    a, b = set(_WORD.findall(first.lower())), set(_WORD.findall(second.lower()))
    return len(a & b) / len(a | b) if a | b else 0.0


def _quartiles(group: str, values: NDArray[Any], unit: str = "") -> list[RowGroup]:
    """Four parts of about equal size; each is named by its first and last whole number, which no other part has."""
    whole = np.rint(values).astype(np.int64)
    edges = np.unique(np.quantile(whole, [0, 0.25, 0.5, 0.75, 1]).astype(np.int64))
    found: list[RowGroup] = []
    for low, high in zip(
        [int(edges[0]), *(edges[1:-1] + 1).tolist()], edges[1:].tolist() or edges.tolist(), strict=True
    ):
        name = f"{low}{unit} to {high}{unit}" if low < high else f"{low}{unit}"
        found.append((group, name, (whole >= low) & (whole <= high)))
    return found
