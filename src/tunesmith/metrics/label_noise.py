"""The share of wrong training labels, estimated from predictions of a model that has not seen the examples.

A label is drawn from a softmax of the scores with probability 1 - share, and is a random other label otherwise. If labels are
wrong, the error rate does not fall below `share` however confident the model is; if a task is hard, it falls with the confidence.
The scale of the scores, a bias per class and the share are fitted together; the interval comes from the profile likelihood.
Validation examples have their own share: if they have fewer errors, they determine the scale, and the interval is narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunesmith.metrics.intervals import Array

SHARES = np.arange(0.0, 0.61, 0.02)
DROP = 2.7
"""How far the log-likelihood may fall inside the interval. 1.92 would be 95% for an exact model; hard tasks are not."""
LEAST_GAIN = 10.0
"""Log-likelihood by which the scores must explain the labels better than class frequencies. With less, nothing can be told."""
PULL = 0.1
"""Strength of the prior of scale and biases."""
MOST_ROWS = 2000
WIDE = 0.2
"""An interval that is wider than this is not reported as an estimate."""
NOISY = 0.08
"""Labels are called wrong if the interval begins above this share: no clean development task did."""


@dataclass(frozen=True)
class LabelNoise:
    """The most likely share of wrong labels, its interval, and the number of training examples."""

    share: float
    low: float
    high: float
    n: int

    @property
    def is_precise(self) -> bool:
        """Whether the interval is narrow enough to report the share."""
        return self.high - self.low <= WIDE

    @property
    def is_noisy(self) -> bool:
        """Whether many labels are wrong beyond doubt."""
        return self.low >= NOISY

    @property
    def is_clean(self) -> bool:
        """Whether few labels are wrong beyond doubt."""
        return self.high < NOISY

    def text(self) -> str:
        """Return the share with its interval."""
        return f"{self.share:.0%} of the training labels ({self.low:.0%} to {self.high:.0%}, n={self.n:,})"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of data_summary.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> LabelNoise | None:
        """Return what `to_json` wrote; None for anything else."""
        try:
            noise = cls(float(found["share"]), float(found["low"]), float(found["high"]), int(found["n"]))
        except (KeyError, TypeError, ValueError):
            return None
        return noise if 0 <= noise.low <= noise.share <= noise.high <= 1 else None


def estimate_label_noise(parts: Sequence[tuple[Array, Array]], classes: int) -> LabelNoise | None:
    """Estimate the share of wrong labels in the first of `parts`; None if the scores say too little about the labels.

    Each part is (scores of shape (examples, classes), labels). The scores of training examples must be out of fold.
    """
    from scipy.optimize import minimize

    if classes < 2 or not parts or not len(parts[0][1]):
        return None
    scale = float(parts[0][0].std()) or 1.0
    samples = [_Sample.of(scores / scale, labels, classes) for scores, labels in parts if len(labels)]
    most = (classes - 1) / classes  # the share of wrong labels if all are random
    shares = SHARES[most - 0.04 > SHARES]
    start = np.concatenate([np.zeros(classes + 1), np.full(len(samples) - 1, -3.0)])
    bounds = [(-4.0, 5.0)] + [(-6.0, 6.0)] * classes + [(-5.0, 4.0)] * (len(samples) - 1)

    def loss(point: Array, share: float) -> tuple[float, Array]:
        """Negative log-likelihood and gradient by log scale, biases, and the logit of the other samples' shares."""
        free = point[: classes + 1]
        total, slope = 0.5 * PULL * float(free @ free), np.zeros(len(point))
        slope[: classes + 1] = PULL * free
        for place, sample in enumerate(samples):
            wrong, change = share, 0.0
            if place:
                at = 1 / (1 + math.exp(-point[classes + place]))
                wrong, change = most * at, most * at * (1 - at)
            value, by_free, by_wrong = sample.likelihood(free, wrong)
            total -= value
            slope[: classes + 1] -= by_free
            if place:
                slope[classes + place] -= change * by_wrong
        return total, slope

    found = np.full(len(shares), -np.inf)
    for number, share in enumerate(shares):
        fitted = minimize(loss, start, args=(share,), jac=True, method="L-BFGS-B", bounds=bounds)
        start, found[number] = fitted.x, -fitted.fun
        if found[number] < found.max() - 4 * DROP:
            break  # larger shares are less likely still
    if found.max() - sum(sample.constant for sample in samples) < LEAST_GAIN:
        return None
    inside = shares[found >= found.max() - DROP]
    best = float(shares[int(found.argmax())])
    return LabelNoise(
        round(best, 2), round(float(inside.min()), 2), round(float(inside.max()), 2), len(samples[0].labels)
    )


@dataclass(frozen=True, eq=False)
class _Sample:
    """Scores with mean 0 per example, and labels."""

    scores: Array
    labels: Array
    targets: Array
    """One-hot labels."""

    @classmethod
    def of(cls, scores: Array, labels: Array, classes: int) -> _Sample:
        some = np.linspace(0, len(labels) - 1, min(len(labels), MOST_ROWS)).round().astype(np.int64)
        scores, labels = np.asarray(scores, np.float64)[some], np.asarray(labels, np.int64)[some]
        return cls(scores - scores.mean(axis=1, keepdims=True), labels, np.eye(classes)[labels])

    @property
    def constant(self) -> float:
        """Log-likelihood of the class frequencies."""
        shares = self.targets.mean(axis=0)
        return float(np.log(shares[self.labels]).sum())

    def likelihood(self, free: Array, wrong: float) -> tuple[float, Array, float]:
        """Return the log-likelihood and its derivatives by (log scale, biases) and by the share of wrong labels."""
        others = self.scores.shape[1] - 1
        scaled = math.exp(free[0]) * self.scores
        logits = scaled + free[1:]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        right = p[np.arange(len(p)), self.labels]
        mixed = np.maximum((1 - wrong) * right + wrong / others * (1 - right), 1e-12)
        weight = (1 - wrong - wrong / others) * right / mixed
        by_logit = weight[:, None] * (self.targets - p)
        by_free = np.concatenate([[(by_logit * scaled).sum()], by_logit.sum(axis=0)])
        by_wrong = float((((1 - right) / others - right) / mixed).sum())
        return float(np.log(mixed).sum()), by_free, by_wrong
