"""Does 0.8 mean right 8 times in 10? Reliability bins, expected calibration error; arrays in, numbers out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.metrics.rows import IGNORED_LABELS, Array, to_numpy
from tunesmith.metrics.uncertainty import wilson_limits


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Rows whose top probability is in (low, high]; `accuracy` comes with its 95% interval."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def reliability_bins(probabilities: Any, references: Any, *, num_bins: int = 15) -> tuple[ReliabilityBin, ...]:
    """The bins of equal width that hold rows, lowest confidence first; () without labelled rows."""
    table, labels = _labelled(probabilities, references)
    if len(table) == 0:
        return ()
    top, right = table.max(axis=1), table.argmax(axis=1) == labels
    cuts = np.linspace(0.0, 1.0, num_bins + 1)
    # Right edges belong to a bin, so that a confidence of exactly 1.0 falls in the last one.
    where = np.clip(np.searchsorted(cuts, top, side="left") - 1, 0, max(len(cuts) - 2, 0))
    bins = []
    for index in np.unique(where):
        inside = where == index
        count, accuracy = int(inside.sum()), float(right[inside].mean())
        low, high = wilson_limits(accuracy, count)
        edge = float(cuts[index]), float(cuts[min(index + 1, len(cuts) - 1)])
        bins.append(ReliabilityBin(*edge, count, float(top[inside].mean()), accuracy, float(low), float(high)))
    return tuple(bins)


def expected_calibration_error(probabilities: Any, references: Any, *, num_bins: int = 15) -> float | None:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by rows; None without labelled rows."""
    bins = reliability_bins(probabilities, references, num_bins=num_bins)
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / total if total else None


def _labelled(probabilities: Any, references: Any) -> tuple[Array, Array]:
    """(n, classes) probabilities and ids of the labelled rows; one column means the probability of label 1."""
    table, labels = to_numpy(probabilities).astype(np.float64), to_numpy(references)
    if len(table) != len(labels):
        raise DataError(f"{len(table)} probabilities for {len(labels)} references")
    if table.ndim == 1:
        table = np.stack([1.0 - table, table], axis=1)
    keep = ~np.isin(labels, IGNORED_LABELS)
    table, labels = table[keep], labels[keep].astype(np.int64)
    if len(table) and not ((table >= -1e-6).all() and np.allclose(table.sum(axis=1), 1.0, atol=1e-3)):
        raise DataError("rows are not probabilities that sum to 1", fix="Apply softmax to logits first.")
    if len(labels) and (labels.min() < 0 or labels.max() >= table.shape[1]):
        raise DataError(f"labels must be 0 to {table.shape[1] - 1}, got {int(labels.min())} to {int(labels.max())}")
    return table, labels
