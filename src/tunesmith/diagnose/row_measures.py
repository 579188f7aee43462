"""What the rows of one evaluation show by themselves: how alike the answers are, how right the surest, which class is ignored."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tunesmith.diagnose.signs import finite_mean, needed_z
from tunesmith.diagnose.thresholds import ERROR_RATE
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
    """Excess kurtosis of a regression's errors beyond that of its labels: large when some labels are far off; NaN for classes."""
    if rows.task is not Task.REGRESSION:
        return math.nan
    return _kurtosis(rows.labels - rows.predictions) - max(0.0, _kurtosis(rows.labels))


def _kurtosis(values: NDArray[np.float64]) -> float:
    rest = values - values.mean()
    scale = float((rest**2).mean())
    return float((rest**4).mean() / scale**2 - 3) if scale > 0 and np.isfinite(scale) else math.nan


def turned(rows: RowEvidence) -> float:
    """How surely the answers mean other labels than the rows have: 1 is significant at 1% over all pairs of labels.

    Rows of another label are called "a" more often than rows of label "a" are (a test of two shares); the answers of a regression
    fall where its labels rise. Neither a hard task nor labels without meaning do that.
    """
    if rows.task is Task.REGRESSION:
        return -rows.score_parts()[0] * math.sqrt(max(1, len(rows) - 1)) / needed_z(1, ERROR_RATE)
    width = len(rows.constant.values)
    many = rows.task is Task.MULTILABEL
    has = rows.labels.astype(bool) if many else rows.labels[:, None] == np.arange(width)
    said = rows.predictions.astype(bool) if many else rows.predictions[:, None] == np.arange(width)
    best = -math.inf
    for name in range(width):
        own = said[has[:, name], name]
        for other in range(width):
            others = said[has[:, other] & ~has[:, name], name]
            if other != name and min(len(own), len(others)) >= 5:
                best = max(best, _share_z(others, own))
    return best / needed_z(width * (width - 1), ERROR_RATE)


def _share_z(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """By how many standard errors the first share is above the second."""
    both = float(np.concatenate([one, other]).mean())
    error = math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
    return float(one.mean() - other.mean()) / error if error > 0 else 0.0
