"""Labels of a regression that have nothing to do with their texts: their share by maximum likelihood.

Each label is drawn either around a line through the prediction, with errors of Student's t (which covers heavy tails), or from
all labels alike, whatever the prediction. The likelihood ratio beside the model without the second part says how sure that is.
"""

from __future__ import annotations

import math

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence
from tunesmith.runs.series import Floats

FREEDOMS = (2.5, 4.0, 8.0, 30.0)
STARTS = (0.2, 0.5)
ROUNDS = 60


def random_share(rows: RowEvidence) -> tuple[float, float]:
    """(share of labels drawn from all labels, twice the logarithm of the likelihood ratio); NaN where it cannot be asked."""
    if rows.task is not Task.REGRESSION or len(rows) < 20 or not np.isfinite(rows.predictions).all():
        return math.nan, math.nan
    spread, scale = float(rows.predictions.std()), float(rows.labels.std())
    if not (spread > 1e-3 * scale > 0):
        return math.nan, math.nan
    x, y = (rows.predictions - rows.predictions.mean()) / spread, (rows.labels - rows.labels.mean()) / scale
    everywhere = _density(y)
    plain = max(_fit(x, y, everywhere, freedom, 0.0)[0] for freedom in FREEDOMS)
    mixed, share = max(_fit(x, y, everywhere, freedom, start) for freedom in FREEDOMS for start in STARTS)
    return share, 2 * (mixed - plain)


def _density(y: Floats) -> Floats:
    """Of each label among the others: a normal kernel, the row itself left out."""
    width = 1.06 * len(y) ** -0.2
    found = np.exp(-0.5 * ((y[:, None] - y[None]) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    np.fill_diagonal(found, 0.0)
    return np.asarray(found.sum(axis=1) / (len(y) - 1) + 1e-4)


def _fit(x: Floats, y: Floats, everywhere: Floats, freedom: float, share: float) -> tuple[float, float]:
    """(log likelihood, share) after some rounds of expectation and maximisation; a share of 0 stays 0."""
    slope = float((x * y).mean()) / (1 - share)
    middle, width = 0.0, max(0.05, float((y - slope * x).std()) * (1 - share))
    logs = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    whole = np.full(len(y), math.nan)
    for _ in range(ROUNDS):
        z = (y - middle - slope * x) / width
        inside = (1 - share) * np.exp(logs - 0.5 * (freedom + 1) * np.log1p(z * z / freedom)) / width
        whole = inside + share * everywhere
        own = inside / whole
        weight = own * (freedom + 1) / (freedom + z * z)
        mean_x, mean_y = (float((weight * part).sum() / weight.sum()) for part in (x, y))
        slope = float((weight * (x - mean_x) * (y - mean_y)).sum() / max(1e-9, (weight * (x - mean_x) ** 2).sum()))
        middle = mean_y - slope * mean_x
        width = math.sqrt(max(1e-4, float((weight * (y - middle - slope * x) ** 2).sum() / own.sum())))
        share = float(1 - own.mean()) if share else 0.0
    return float(np.log(whole).sum()), share
