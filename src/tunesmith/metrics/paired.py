"""Compare two sets of predictions for the same rows.

Accuracy: McNemar's exact test. Any other metric: rows swapped at random between the two (a permutation test, which keeps
its level at any n) for the p value, rows drawn with replacement (paired bootstrap) for the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.table import Array, Formula, Metric, Rows, Scale, Z, make_rows, metric_of

ROW_DRAWS = 10_000_000
"""Budget of row draws for metrics that are not counts: 2,000 resamples up to 5,000 rows, never under 100."""
LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class PairedResult:
    """`difference` is B minus A. All numbers are None if the metric is undefined on these rows."""

    metric: str
    value_a: float | None
    value_b: float | None
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    n: int
    method: str


def compare_predictions(
    predictions_a: Any,
    predictions_b: Any,
    references: Any,
    *,
    task: Task,
    metric: str = "accuracy",
    scores: Scale = "logits",
    decisions: tuple[Any, Any] = (None, None),
    seed: int = 0,
    resamples: int = 2000,
) -> PairedResult:
    """Compare B with A on the same labeled examples; `decisions` of A and of B as in `make_rows`."""
    chosen = metric_of(metric, task)
    name = chosen.name
    given = zip((predictions_a, predictions_b), decisions, strict=True)
    rows_a, rows_b = (make_rows(p, references, task=task, scores=scores, decisions=d) for p, d in given)
    value_a, value_b = chosen.measure(rows_a), chosen.measure(rows_b)
    if value_a is None or value_b is None:
        return PairedResult(name, value_a, value_b, None, None, None, None, len(rows_a), "none")
    if chosen.counts_right_rows:
        right_a, right_b = _right(rows_a), _right(rows_b)
        low, high, p_value = mcnemar(int((right_b & ~right_a).sum()), int((right_a & ~right_b).sum()), len(rows_a))
        method = "McNemar exact"
    else:
        low, high, p_value = _resample(chosen, rows_a, rows_b, value_b - value_a, seed, resamples)
        method = "permutation test, paired bootstrap interval"
    difference = value_b - value_a
    if p_value > LEVEL:  # Readers compare the interval with 0, so it must not contradict the test.
        low, high = min(low, 0.0), max(high, 0.0)
    return PairedResult(name, value_a, value_b, difference, low, high, p_value, len(rows_a), method)


def mcnemar(gained: int, lost: int, n: int) -> tuple[float, float, float]:
    """Return the interval of the accuracy difference (Bonett and Price) and the exact two-sided p value."""
    if gained + lost > n or n < 1:
        raise DataError(f"{gained} gained and {lost} lost rows do not fit in {n}")
    from scipy.stats import binomtest

    p_value = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * float(np.sqrt((up + down - (up - down) ** 2) / (n + 2)))
    return max(up - down - half, -1.0), min(up - down + half, 1.0), p_value


def _right(rows: Rows) -> Array:
    same = rows.references == rows.decisions
    result: Array = same.all(axis=1) if same.ndim == 2 else same
    return result


def _resample(
    metric: Metric, a: Rows, b: Rows, difference: float, seed: int, resamples: int
) -> tuple[float, float, float]:
    random = np.random.default_rng(seed)
    if metric.formula is not None:
        drawn, swapped = _resample_cells(metric.formula, a, b, random, resamples)
    else:
        count = int(np.clip(ROW_DRAWS // len(a), 100, resamples))
        drawn, swapped = _resample_rows(metric, a, b, random, count)
    drawn, swapped = drawn[np.isfinite(drawn)], swapped[np.isfinite(swapped)]
    # The observed labeling is one of the permutations: p is never 0. The tolerance allows for different orders of summation.
    p_value = (1 + int((np.abs(swapped) >= abs(difference) - 1e-12).sum())) / (len(swapped) + 1)
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (difference, difference)
    if p_value <= LEVEL and low <= 0 <= high:  # the bound on the side of 0 is then that of the test
        reach = np.quantile(np.abs(swapped), 1 - LEVEL, method="inverted_cdf")
        low, high = (difference - reach, high) if difference > 0 else (low, difference + reach)
    return float(low), float(high), p_value


def _resample_cells(
    formula: Formula, a: Rows, b: Rows, random: np.random.Generator, resamples: int
) -> tuple[Array, Array]:
    """Depends only on the counts of (true, A, B), so the cost doesn't grow with n."""
    k = int(max(a.references.max(), a.decisions.max(), b.decisions.max(), 1)) + 1
    cells, counts = np.unique((a.references * k + a.decisions) * k + b.decisions, return_counts=True)
    true, ours, theirs = (np.eye(k)[ids] for ids in (cells // k**2, cells // k % k, cells % k))

    def gap(stay: Array, move: Array) -> Array:
        """Return the score of B minus that of A if `move` rows of each cell are swapped between them."""

        def score(own: Array, other: Array) -> Array:
            hits = stay @ (true * own) + move @ (true * other)
            return formula(hits, (stay + move) @ true, stay @ own + move @ other)

        return score(theirs, ours) - score(ours, theirs)

    drawn, swapped = [], []
    step = max(1, 4_000_000 // (len(cells) + k))  # keeps the tables under about 32 MB
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        rows = random.multinomial(counts.sum(), counts / counts.sum(), size=size)
        drawn.append(gap(rows, np.zeros_like(rows)))
        swap = random.binomial(counts, 0.5, size=(size, len(cells)))
        swapped.append(gap(counts - swap, swap))
    return np.concatenate(drawn), np.concatenate(swapped)


def _resample_rows(metric: Metric, a: Rows, b: Rows, random: np.random.Generator, count: int) -> tuple[Array, Array]:
    drawn, swapped = np.full(count, np.nan), np.full(count, np.nan)
    for i in range(count):
        picked = random.integers(0, len(a), len(a))
        swap = random.random(len(a)) < 0.5
        drawn[i] = _gap(metric, a.take(picked), b.take(picked))
        swapped[i] = _gap(metric, _mix(a, b, swap), _mix(b, a, swap))
    return drawn, swapped


def _gap(metric: Metric, a: Rows, b: Rows) -> float:
    value_a, value_b = metric.measure(a), metric.measure(b)
    return float("nan") if value_a is None or value_b is None else value_b - value_a


def _mix(rows: Rows, other: Rows, swap: Array) -> Rows:
    def mixed(mine: Array, theirs: Array) -> Array:
        return np.where(swap if mine.ndim == 1 else swap[:, None], theirs, mine)

    both = rows.probabilities is not None and other.probabilities is not None
    probabilities = mixed(rows.probabilities, other.probabilities) if both else None  # type: ignore[arg-type]
    return Rows(rows.references, mixed(rows.decisions, other.decisions), probabilities)
