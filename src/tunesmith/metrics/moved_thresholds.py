"""Thresholds of labels, fitted to rows that were not trained on: for F1 of a rare label one half is seldom the best."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tunesmith.labels import Task, choose_labels
from tunesmith.metrics.rows import Array
from tunesmith.metrics.suite import make_suite

FOLDS = 5
DRAWS = 200
FEWEST_OF_A_LABEL = 10
"""Rows with the label, and rows without: with fewer a threshold is fitted to chance."""
EXPONENTS = tuple(k / 10 for k in range(16))
ERRORS = 2.0
"""A gain must be so many times its standard error: chance alone moves a threshold in one run of forty, with 1 in one of six."""


@dataclass(frozen=True)
class MovedThresholds:
    """`after` is the score of rows whose thresholds were fitted to other rows; `error` that of the gain, by a bootstrap.

    `thresholds` were fitted to all rows; None: moving them is not surely better.
    """

    thresholds: tuple[float, ...] | None
    metric: str
    before: float
    after: float
    error: float
    rows: int
    decisions: Array | None = field(default=None, compare=False)
    """The labels of the rows that have one, each decided by thresholds of the others; None where they are not moved."""

    def line(self, what: str = "validation") -> str:
        """As it is printed."""
        gain = (
            f"{self.metric} {self.before:.3f} -> {self.after:.3f} ({self.after - self.before:+.3f} ± {self.error:.3f})"
        )
        where = f"on {self.rows:,} {what} rows, each decided by thresholds of the others"
        if self.thresholds is None:
            return f"Thresholds stay at one half: moved ones have {gain} {where}."
        shown = ", ".join(f"{t:.2f}" for t in self.thresholds)
        return f"Thresholds moved to {shown}: {gain} {where}."


def fit_thresholds(probabilities: Array, gold: Array, task: Task, *, seed: int = 0) -> MovedThresholds | None:
    """Binary: for F1 of label 1. Multilabel: for F1 of each label. Many classes: a power of each label's share, for macro F1.

    None for regression, and for too few rows of the rarest label.
    """
    known = (gold >= 0).all(axis=1) if gold.ndim == 2 else gold >= 0
    probabilities, gold = np.asarray(probabilities, dtype=np.float64)[known], gold[known].astype(np.int64)
    if task is Task.REGRESSION or not len(gold) or _fewest(gold, probabilities.shape[1]) < FEWEST_OF_A_LABEL:
        return None
    rng = np.random.default_rng(seed)
    fold = rng.permutation(len(gold)) % FOLDS
    plain, moved = choose_labels(probabilities, task), np.empty_like(choose_labels(probabilities, task))
    for k in range(FOLDS):
        fitted = _fit(probabilities[fold != k], gold[fold != k], task)
        moved[fold == k] = choose_labels(probabilities[fold == k], task, fitted)
    metric = "f1" if task is Task.BINARY else "f1_macro"
    suite = make_suite(task, names=(metric,))

    def score(decisions: Array, some: Array) -> float:
        return suite.compute(decisions[some].astype(np.int64), gold[some])[metric] or 0.0

    every = np.arange(len(gold))
    before, after = score(plain, every), score(moved, every)
    draws = [rng.integers(len(gold), size=len(gold)) for _ in range(DRAWS)]
    error = float(np.std([score(moved, some) - score(plain, some) for some in draws]))
    moves = after - before > ERRORS * error
    kept = _fit(probabilities, gold, task) if moves else None
    return MovedThresholds(kept, metric, before, after, error, len(gold), moved.astype(np.int64) if moves else None)


def _fewest(gold: Array, labels: int) -> int:
    if gold.ndim == 2:
        counts = gold.sum(axis=0)
        return int(np.minimum(counts, len(gold) - counts).min())
    return int(np.bincount(gold, minlength=labels).min())


def _fit(probabilities: Array, gold: Array, task: Task) -> tuple[float, ...]:
    if task is Task.BINARY:
        found = _best_for_f1(probabilities[:, 1], gold == 1)
        return (1 - found, found)
    if task is Task.MULTILABEL:
        return tuple(_best_for_f1(probabilities[:, k], gold[:, k] == 1) for k in range(gold.shape[1]))
    shares = (np.bincount(gold, minlength=probabilities.shape[1]) + 1) / (len(gold) + probabilities.shape[1])
    tried = [shares**power / (shares**power).max() for power in EXPONENTS]
    suite = make_suite(task, names=("f1_macro",))
    scores = [suite.compute(choose_labels(probabilities, task, t), gold)["f1_macro"] or 0.0 for t in tried]
    return tuple(float(t) for t in tried[int(np.argmax(scores))])


def _best_for_f1(scores: Array, positive: Array) -> float:
    """The threshold with the best F1, between the score that it lets in and the next one below."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + max(int(positive.sum()), 1))
    at = int(np.argmax(f1))
    below = scores[order[at + 1]] if at + 1 < len(order) else 0.0
    return float(np.clip((scores[order[at]] + below) / 2, 1e-6, 1 - 1e-6))
