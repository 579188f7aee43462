"""Scores of parts of the data, with intervals; a part is called worse only beyond the luck of looking at many parts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.metrics.uncertainty import wilson_limits
from tunesmith.report.predictions import PredictedRows

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
