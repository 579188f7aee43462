"""One metric of one set of rows: its value, and its value with the interval that fits it."""

from __future__ import annotations

import math

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics import classification, multilabel, regression, uncertainty
from tunesmith.metrics.rows import Array, Rows
from tunesmith.metrics.uncertainty import Limits, Score

AP_WORK = 8_000_000
"""Row draws spent on the standard error of average precision: 400 resamples up to 20,000 rows, never under 80."""


def counts_of(rows: Rows, task: Task) -> Array:
    """The confusion matrix of single-label rows; at least 2x2 for a binary task."""
    width = None if rows.probabilities is None else rows.probabilities.shape[1]
    if task is Task.BINARY:
        width = 2
    return classification.confusion_matrix(rows.references, rows.decisions, num_classes=width)


def value_of(name: str, rows: Rows, task: Task, counts: Array | None = None) -> float | None:
    """The metric, or None where these rows do not define it."""
    if len(rows) == 0 or not rows.sound:
        return None
    value = _raw_value(name, rows, task, counts)
    return value if math.isfinite(value) else None


def _raw_value(name: str, rows: Rows, task: Task, counts: Array | None) -> float:
    if task is Task.REGRESSION:
        return regression.REGRESSION_METRICS[name](rows.references, rows.decisions)
    if task is Task.MULTILABEL:
        if name == "subset_accuracy":
            return multilabel.subset_accuracy(rows.references, rows.decisions)
        return _multilabel_parts(name, rows)[0]
    if name in classification.COUNT_METRICS:
        table = counts_of(rows, task) if counts is None else counts
        return float(classification.COUNT_METRICS[name](table))
    if rows.probabilities is None:
        return math.nan
    if name == "auroc":
        return classification.auroc_one_vs_rest(rows.references, rows.probabilities)[0]
    if name == "average_precision":
        return classification.average_precision(rows.references == 1, classification.log_odds(rows.probabilities))
    return float(classification.row_log_loss(rows.references, rows.probabilities).mean())


def score_of(name: str, rows: Rows, task: Task, *, confidence: float = 0.95, seed: int = 0) -> Score:
    """The metric with its interval. `seed` matters to average precision only, the one score that is resampled."""
    counts = counts_of(rows, task) if name in classification.COUNT_METRICS and task is not Task.MULTILABEL else None
    value = value_of(name, rows, task, counts)
    if value is None:
        return Score(None, None, None, len(rows), "none")
    if task is Task.REGRESSION:
        limits, method = _regression_limits(name, rows, value, confidence)
    elif task is Task.MULTILABEL:
        limits, method = _multilabel_limits(name, rows, value, confidence)
    elif counts is not None:
        limits, method = _count_limits(name, counts, value, confidence)
    else:
        limits, method = _probability_limits(name, rows, value, confidence, seed)
    if limits is None:
        return Score(value, None, None, len(rows), "none: too few or constant rows")
    # Rounding may leave a limit a hair on the wrong side of the value.
    return Score(value, min(limits[0], value), max(limits[1], value), len(rows), method)


def _multilabel_parts(name: str, rows: Rows) -> tuple[float, Array]:
    if name == "auroc":
        if rows.probabilities is None:
            return math.nan, np.zeros(len(rows))
        return multilabel.auroc_macro_parts(rows.references, rows.probabilities)
    parts = multilabel.f1_micro_parts if name == "f1_micro" else multilabel.f1_macro_parts
    return parts(rows.references, rows.decisions)


def _count_limits(name: str, counts: Array, value: float, confidence: float) -> tuple[Limits, str]:
    true, predicted, hits = counts.sum(1), counts.sum(0), np.diagonal(counts)
    if name in ("accuracy", "f1_micro"):
        return _pair(uncertainty.wilson_limits(value, counts.sum(), confidence)), "wilson"
    if name in ("precision", "recall"):
        trials = predicted if name == "precision" else true
        return _pair(uncertainty.wilson_limits(value, trials[1], confidence)), "wilson"
    if name == "f1":
        low, high = uncertainty.f1_limits(counts, confidence)
        return (float(low[1]), float(high[1])), "wilson given TP+FP+FN"
    seen = (true + predicted) > 0
    counts, true, predicted, hits = counts[np.ix_(seen, seen)], true[seen], predicted[seen], hits[seen]
    if name == "f1_macro":
        low, high = uncertainty.f1_limits(counts, confidence)
        correlation = uncertainty.f1_correlation(counts)
        values = classification.per_class_f1(counts)
        return uncertainty.combine_limits(values, low, high, correlation), "wilson by class, combined"
    if name in ("balanced_accuracy", "recall_macro", "precision_macro"):
        trials = predicted if name == "precision_macro" else true
        used = trials > 0 if name == "balanced_accuracy" else np.ones(len(trials), bool)
        share = hits[used] / np.maximum(trials[used], 1)
        limits = uncertainty.wilson_limits(share, trials[used], confidence)
        return uncertainty.combine_limits(share, *limits), "wilson by class, combined"
    return _designed_limits(name, counts, value, confidence), "wilson at effective n"


def _designed_limits(name: str, counts: Array, value: float, confidence: float) -> Limits:
    """MCC and weighted F1: the effective n comes from the smoothed counts, the centre from the real ones."""
    floor = -1.0 if name == "matthews_correlation" else 0.0
    design = uncertainty.matthews_design if floor else uncertainty.weighted_f1_design
    smoothed, variance = design(counts)
    share = (smoothed - floor) / (1 - floor)
    n = float(counts.sum())
    effective = share * (1 - share) * (1 - floor) ** 2 / variance * n / (n + 1) if variance > 0 else n
    low, high = uncertainty.wilson_limits((value - floor) / (1 - floor), effective, confidence)
    return floor + (1 - floor) * float(low), floor + (1 - floor) * float(high)


def _probability_limits(name: str, rows: Rows, value: float, confidence: float, seed: int) -> tuple[Limits | None, str]:
    assert rows.probabilities is not None
    if name == "log_loss":
        losses = classification.row_log_loss(rows.references, rows.probabilities)
        return uncertainty.log_mean_limits(losses, confidence), "t on the log scale"
    smallest = float(np.bincount(rows.references, minlength=rows.probabilities.shape[1]).min())
    if name == "auroc":
        _, influence = classification.auroc_one_vs_rest(rows.references, rows.probabilities)
        variance = float(influence @ influence)
        limits = uncertainty.effective_limits(value, variance, rows=smallest, confidence=confidence)
        return limits, "DeLong, wilson at effective n"
    variance = _average_precision_variance(rows.references == 1, classification.log_odds(rows.probabilities), seed)
    positives = float((rows.references == 1).sum())
    limits = uncertainty.effective_limits(value, variance, rows=positives, confidence=confidence)
    return limits, "bootstrap, wilson at effective n"


def _average_precision_variance(positive: Array, score: Array, seed: int) -> float:
    """Variance over Poisson resamples: sorted once, then two running sums a resample."""
    order = np.argsort(-score, kind="stable")
    positive, score = positive[order], score[order]
    last_of_tie = np.append(score[1:] != score[:-1], True)
    draws = int(np.clip(AP_WORK // max(len(score), 1), 80, 400))
    random = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        weights = random.poisson(1.0, len(score))
        hits = np.cumsum(weights * positive)[last_of_tie]
        seen = np.cumsum(weights)[last_of_tie]
        if hits[-1] > 0:
            values.append(float(np.diff(hits, prepend=0) @ (hits / np.maximum(seen, 1)) / hits[-1]))
    return float(np.var(values)) if len(values) > 1 else 0.0


def _regression_limits(name: str, rows: Rows, value: float, confidence: float) -> tuple[Limits | None, str]:
    x, y = rows.references, rows.decisions
    if name == "pearson":
        return uncertainty.pearson_limits(x, y, value, confidence), "robust Fisher z"
    if name == "spearmanr":
        return uncertainty.spearman_limits(x, y, value, confidence), "robust Fisher z"
    if name == "r2":
        return uncertainty.r2_limits(x, y, confidence), "t on the log scale"
    errors = (x - y) ** 2 if name == "mse" else np.abs(x - y)
    return uncertainty.log_mean_limits(errors, confidence), "t on the log scale"


def _multilabel_limits(name: str, rows: Rows, value: float, confidence: float) -> tuple[Limits, str]:
    if name == "subset_accuracy":
        return _pair(uncertainty.wilson_limits(value, len(rows), confidence)), "wilson"
    _, influence = _multilabel_parts(name, rows)
    variance = float(influence @ influence)
    return uncertainty.effective_limits(value, variance, rows=len(rows), confidence=confidence), "wilson at effective n"


def _pair(limits: tuple[Array, Array]) -> Limits:
    return float(limits[0]), float(limits[1])
