"""The temperature of a model: logits divided by it give probabilities that mean what they say. Fitted to rows not trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics.calibration import expected_calibration_error
from tunesmith.metrics.rows import Array, softmax

FEWEST_ROWS = 30
FOLDS = 5
LIMITS = (0.1, 10.0)


@dataclass(frozen=True)
class Temperature:
    """`value` was fitted to all rows. The errors are those of rows whose temperature was fitted to other rows."""

    value: float
    loss_before: float
    loss_after: float
    error_before: float
    error_after: float
    rows: int

    def line(self) -> str:
        """As it is printed."""
        return (
            f"temperature {self.value:.3g}: calibration error {self.error_before:.3f} -> {self.error_after:.3f}, log loss "
            f"{self.loss_before:.3f} -> {self.loss_after:.3f} on {self.rows:,} rows, each with the temperature of others"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def fit_temperature(logits: Array, gold: Array, task: Task, *, seed: int = 0) -> Temperature | None:
    """None for regression, for too few rows, and where the log loss of rows that did not fit it is no better."""
    if task is Task.REGRESSION:
        return None
    known = (gold >= 0).all(axis=1) if gold.ndim == 2 else gold >= 0
    logits, gold = np.asarray(logits, dtype=np.float64)[known], gold[known].astype(np.int64)
    if len(gold) < FEWEST_ROWS:
        return None
    fold = np.random.default_rng(seed).permutation(len(gold)) % FOLDS
    heat = np.empty(len(gold))
    for k in range(FOLDS):
        heat[fold == k] = _fit(logits[fold != k], gold[fold != k])
    after, before = log_loss_of(logits / heat[:, None], gold), log_loss_of(logits, gold)
    if after >= before:
        return None
    worse, better = _calibration(logits, gold), _calibration(logits / heat[:, None], gold)
    return Temperature(_fit(logits, gold), before, after, worse, better, len(gold))


def log_loss_of(logits: Array, gold: Array) -> float:
    """The mean of -log p of the label; of each label where rows have several."""
    if gold.ndim == 2:
        return float(np.logaddexp(0.0, np.where(gold == 1, -logits, logits)).mean())
    top = logits.max(axis=1, keepdims=True)
    norm = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return float((norm - logits[np.arange(len(gold)), gold]).mean())


def _fit(logits: Array, gold: Array) -> float:
    from scipy.optimize import minimize_scalar

    low, high = np.log(LIMITS)
    found = minimize_scalar(lambda t: log_loss_of(logits / np.exp(t), gold), bounds=(low, high), method="bounded")
    return float(np.exp(found.x))


def _calibration(logits: Array, gold: Array) -> float:
    if gold.ndim == 2:
        return expected_calibration_error((1 / (1 + np.exp(-logits))).ravel(), gold.ravel()) or 0.0
    return expected_calibration_error(softmax(logits), gold) or 0.0
