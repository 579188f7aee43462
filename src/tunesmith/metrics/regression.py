"""Metrics of one predicted number a row. NaN where a metric is not defined (no spread, too few rows)."""

from __future__ import annotations

import numpy as np

from tunesmith.metrics.rows import Array, mean_ranks


def pearson(references: Array, predictions: Array) -> float:
    """Linear correlation; NaN under two rows or when one side is constant."""
    if len(references) < 2 or np.ptp(references) == 0 or np.ptp(predictions) == 0:
        return float("nan")
    x, y = references - references.mean(), predictions - predictions.mean()
    # Scaled first, so that very large or very small values do not over- or underflow when squared.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearmanr(references: Array, predictions: Array) -> float:
    """Rank correlation, ties at their mean rank; NaN where `pearson` would be."""
    return pearson(mean_ranks(references), mean_ranks(predictions))


def mse(references: Array, predictions: Array) -> float:
    """Mean squared error."""
    return float(np.mean((references - predictions) ** 2)) if len(references) else float("nan")


def mae(references: Array, predictions: Array) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(references - predictions))) if len(references) else float("nan")


def r2(references: Array, predictions: Array) -> float:
    """Share of the references' variance explained; NaN under two rows or without variance."""
    if len(references) < 2 or np.ptp(references) == 0:
        return float("nan")
    return float(1.0 - np.mean((references - predictions) ** 2) / np.var(references))
