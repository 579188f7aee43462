"""Metrics of 0/1 vectors (rows, labels), each with the influence of every row: labels of one row are not independent."""

from __future__ import annotations

import numpy as np

from tunesmith.metrics.classification import auroc_parts
from tunesmith.metrics.rows import Array


def subset_accuracy(references: Array, decisions: Array) -> float:
    """Share of rows with every label right."""
    return float((references == decisions).all(axis=1).mean()) if len(references) else float("nan")


def f1_micro_parts(references: Array, decisions: Array) -> tuple[float, Array]:
    """F1 over all row-label cells, and each row's influence; NaN when nothing is true and nothing predicted."""
    hits = 2.0 * (references & decisions).sum(axis=1)
    total = (references + decisions).sum(axis=1)
    if total.sum() == 0:
        return float("nan"), np.zeros(len(references))
    value = float(hits.sum() / total.sum())
    return value, (hits - value * total) / total.sum()


def f1_macro_parts(references: Array, decisions: Array) -> tuple[float, Array]:
    """Mean F1 of the labels true or predicted at least once, and each row's influence.

    scikit-learn counts a label that is neither as 0; a label without evidence is left out here.
    """
    hits = 2.0 * (references & decisions)
    total = references + decisions
    seen = total.sum(axis=0) > 0
    if not seen.any():
        return float("nan"), np.zeros(len(references))
    hits, total = hits[:, seen], total[:, seen]
    values = hits.sum(axis=0) / total.sum(axis=0)
    return float(values.mean()), ((hits - values * total) / total.sum(axis=0)).mean(axis=1)


def auroc_macro_parts(references: Array, probabilities: Array) -> tuple[float, Array]:
    """Mean area over the labels and each row's influence; NaN unless every label is both on and off somewhere."""
    parts = [auroc_parts(references[:, c] == 1, probabilities[:, c]) for c in range(references.shape[1])]
    return float(np.mean([area for area, _ in parts])), np.mean([influence for _, influence in parts], axis=0)
