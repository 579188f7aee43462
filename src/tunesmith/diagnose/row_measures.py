"""What the rows of one evaluation show by themselves: how alike the answers are, how right the surest, which class is ignored."""

from __future__ import annotations

import math

import numpy as np

from tunesmith.diagnose.signs import finite_mean
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence


def loss_share(rows: RowEvidence) -> float:
    """The mean loss as a share of the best constant's."""
    return finite_mean(rows.loss) / max(1e-9, finite_mean(rows.constant_loss))


def answer_spread(rows: RowEvidence) -> float:
    """How much the answers differ between rows of one label: 0 when every row gets the same."""
    if rows.task is Task.REGRESSION:
        scale = float(rows.labels.std()) or 1.0
        return float(rows.predictions.std()) / scale if np.isfinite(rows.predictions).all() else 0.0
    if not np.isfinite(rows.loss).all():
        return 0.0
    groups = np.unique(rows.labels, axis=0, return_inverse=True)[1].reshape(-1)
    inside = [rows.loss[groups == g] for g in range(int(groups.max()) + 1)]
    return float(np.sqrt(sum(((part - part.mean()) ** 2).sum() for part in inside) / len(rows)))


def sure_accuracy(rows: RowEvidence, share: float = 0.25) -> float:
    """Accuracy of the rows with the highest confidence; NaN where there is none."""
    if not np.isfinite(rows.confidence).all():
        return math.nan
    surest = np.argsort(-rows.confidence, kind="stable")[: max(10, round(share * len(rows)))]
    return float(rows.score_parts()[1][surest].mean())


def overconfidence(rows: RowEvidence) -> float:
    """Mean confidence minus accuracy: positive when the model is surer than it is right; NaN without a confidence."""
    return float(rows.confidence.mean() - rows.score_parts()[1].mean())


def ignored_classes(rows: RowEvidence) -> list[tuple[int, int]]:
    """(class, its rows) of each class with at least 5 rows that is predicted for at most one in 20 of them."""
    if rows.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    found = []
    for name in range(len(rows.constant.values)):
        own = rows.labels == name
        if own.sum() >= 5 and (rows.predictions[own] == name).mean() <= 0.05:
            found.append((name, int(own.sum())))
    return found


def error_tails(rows: RowEvidence) -> float:
    """Excess kurtosis of the errors of a regression: large when some labels are far off; NaN for classes."""
    if rows.task is not Task.REGRESSION:
        return math.nan
    rest = rows.labels - rows.predictions
    rest = rest - rest.mean()
    scale = float((rest**2).mean())
    return float((rest**4).mean() / scale**2 - 3) if scale > 0 and np.isfinite(scale) else math.nan
