"""All metrics in one table, each with its interval, and `Suite`, which computes those of a task like `evaluate` does.

Keys follow `evaluate` and its glue metric: accuracy, f1, matthews_correlation, pearson, spearmanr. `f1`, `precision` and
`recall` are those of label 1 and exist for binary tasks only; over classes the names are f1_macro, f1_micro, f1_weighted,
balanced_accuracy. Aliases such as macro_f1, mcc, roc_auc and spearman are accepted.

Predictions are ids (n,), or scores (n, classes) of which the largest wins; auroc, average_precision and log_loss need scores.
Examples labeled -1, -100 or NaN are ignored. A metric that is not defined (one class only, no example, a NaN score) is None.

Shares have Wilson's interval. All other intervals come from a standard error: of counts by the delta method, of rankings, errors
and several labels by leaving out parts of the examples. Scores from 0 to 1 then have Wilson's interval at the n with this error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tunesmith.errors import ConfigError, DataError, nearest
from tunesmith.labels import UNLABELED, Task, choose_labels

Array = npt.NDArray[Any]
Limits = tuple[float, float]
Z = NormalDist().inv_cdf(0.975)


def mean_ranks(values: Array) -> Array:
    """Return the rank of each value, from 1; equal values have their mean rank. scipy's takes a second to import."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (counts.cumsum() - (counts - 1) / 2)[group]
    return ranks


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value with its interval. All three are None if the value is undefined on these rows."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    of: str | None = None
    """The class that F1, precision and recall of binary tasks refer to."""

    def title(self, metric: str) -> str:
        """`f1 of 'fraud'`: the name of the metric with its class."""
        return metric if self.of is None else f"{metric} of {self.of!r}"

    def text(self, *, count: bool = True) -> str:
        """`0.8603 [0.823, 0.891] n=408`, or without the count."""
        value = "undefined" if self.value is None else f"{self.value:.4f}"
        limits = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{value}{limits} n={self.n}" if count else f"{value}{limits}"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict; `from_json` restores it."""
        plain = {"value": self.value, "low": self.low, "high": self.high, "n": self.n, "method": self.method}
        return plain if self.of is None else {**plain, "of": self.of}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Score:
        """Return the score that `to_json` wrote."""
        return cls(**data)


def t_quantile(degrees: int) -> float:
    """Return the two-sided 95% quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def wilson_limits(share: Array | float, n: Array | float) -> tuple[Array, Array]:
    """Return Wilson's interval for a proportion, elementwise; [0, 1] if n is 0."""
    z = Z
    share, n = np.asarray(share, np.float64), np.asarray(n, np.float64)
    safe = np.where(n > 0, n, 1.0)
    center = (share + z**2 / (2 * safe)) / (1 + z**2 / safe)
    # Rounding may make the radicand negative if share is 0 or 1.
    spread = np.sqrt(np.maximum(share * (1 - share), 0.0) / safe + z**2 / (4 * safe**2))
    half = z / (1 + z**2 / safe) * spread
    low = np.where(share <= 0, 0.0, np.maximum(center - half, 0.0))
    high = np.where(share >= 1, 1.0, np.minimum(center + half, 1.0))
    return np.where(n > 0, low, 0.0), np.where(n > 0, high, 1.0)


def wilson_pair(share: float, n: float) -> Limits:
    """Return Wilson's interval for one proportion."""
    low, high = wilson_limits(share, n)
    return float(low), float(high)


def f1_limits(share: Array | float, n: Array | float) -> tuple[Array, Array]:
    """Return the interval for F1: Wilson's for the share J = TP / (TP+FP+FN) of n rows, carried over by F1 = 2J / (1+J)."""
    low, high = wilson_limits(share, n)
    return 2 * low / (1 + low), 2 * high / (1 + high)


def share_limits(value: float, error: float, rows: float) -> Limits:
    """Return Wilson's interval at the n with this standard error; at 0 or 1, where the error is 0, at `rows`."""
    inside = 1e-12 < value < 1 - 1e-12 and error > 0
    return wilson_pair(value, value * (1 - value) / error**2 if inside else rows)


def count_limits(formula: Formula, counts: Array, value: float, floor: float = 0.0) -> Limits:
    """Return Wilson's interval for a score of counts, from `floor` to 1, at the n with the variance of the score (delta method).

    Half a row per class, spread over its cells, is added to the counts, so that variances near a perfect score are above 0.
    """
    used, n = counts.sum(1) > 0, counts.sum()
    cells = counts + np.outer(used, used) / (2 * used.sum())
    sums = sums_of(cells)
    smoothed = formula(*sums)
    slopes = []
    for kind in range(3):  # the derivative by the hits, true rows and predicted rows of each class
        step = 1e-4 * np.where(sums[kind] > 0, sums[kind], 1.0)
        moved = [*sums]
        moved[kind] = sums[kind] + np.diag(step)
        slopes.append(np.nan_to_num((formula(*moved) - smoothed) / step))
    influence = np.diag(slopes[0]) + slopes[1][:, None] + slopes[2]
    variance = float((cells * influence**2).sum())
    share, width = float(smoothed - floor) / (1 - floor), 1 - floor
    inside = 1e-9 < share < 1 - 1e-9 and variance > 0
    effective = share * (1 - share) * width**2 / variance * n / cells.sum() if inside else n
    low, high = wilson_pair((value - floor) / width, effective)
    return floor + width * low, floor + width * high


GROUPS = 30
"""Parts of the examples that are omitted in turn."""


def jackknife_error(value: Callable[[Rows], float], rows: Rows) -> float:
    """Return the standard error of a metric (jackknife): how much it differs between rows without one part of them."""
    count = min(len(rows), GROUPS)
    if count < 2:
        return 0.0
    part = np.arange(len(rows)) % count
    found = np.array([value(rows.take(np.flatnonzero(part != k))) for k in range(count)])
    found = found[np.isfinite(found)]
    return math.sqrt((count - 1) * float(found.var())) if len(found) else 0.0


def _half(error: float, n: int) -> float:
    """Return half of the width of a 95% interval."""
    return t_quantile(min(n, GROUPS) - 1) * error


def positive_limits(value: float, error: float, n: int) -> Limits | None:
    """Return the interval for a value above 0, on the log scale; None under two rows."""
    if n < 2 or value <= 0:
        return None
    factor = math.exp(min(_half(error, n) / value, 700.0))
    return value / factor, value * factor


def correlation_limits(r: float, error: float, n: int) -> Limits | None:
    """Return the interval for a correlation, on Fisher's z scale; None under five rows or at |r| = 1."""
    if n < 5 or abs(r) >= 1 - 1e-12:
        return None
    half = _half(error, n) / (1 - r**2)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def r2_limits(value: float, error: float, n: int) -> Limits | None:
    """Return the interval for r2, on the log scale of the unexplained share; None under three rows or for a perfect fit."""
    found = positive_limits(1 - value, error, n) if n > 2 else None
    return None if found is None else (1 - found[1], 1 - found[0])


# --- metrics ----------------------------------------------------------------------------------------------------------

Scale = Literal["logits", "probabilities"]

IGNORED_LABELS = (UNLABELED, -100)
"""-1 as in GLUE test splits, -100 as in torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Labeled examples only. `decisions` are ids, 0/1 vectors or predicted values; `probabilities` is None without scores.

    `sound` is False if a score is NaN; metrics are then undefined.
    """

    references: Array
    decisions: Array
    probabilities: Array | None
    sound: bool = True

    def __len__(self) -> int:
        return len(self.references)

    def take(self, index: Array) -> Rows:
        """Return these rows."""
        probabilities = None if self.probabilities is None else self.probabilities[index]
        return Rows(self.references[index], self.decisions[index], probabilities)


def to_numpy(values: Any) -> Array:
    """Return an array of numbers from a list, an array or a tensor of any device (duck-typed: torch is not imported)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if "bfloat16" in str(getattr(values, "dtype", "")):
            values = values.float()
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "biuf":
        raise DataError(f"metrics need numbers, got {array.dtype} ({array.ravel()[0]!r}, ...)", fix="Pass label ids.")
    return array.astype(np.float64) if array.dtype.kind == "f" or not array.size else array


def make_rows(
    predictions: Any,
    references: Any,
    *,
    task: Task,
    scores: Scale = "logits",
    thresholds: Sequence[float] | None = None,
    decisions: Any = None,
) -> Rows:
    """Return rows with a label, in input order. Lengths, shapes and label ranges that do not fit are a DataError.

    `decisions` are the predicted labels of the examples, all labeled, if they are not those with the largest score.
    """
    predicted, expected = to_numpy(predictions), to_numpy(references)
    if len(predicted.shape) == 0 or len(expected.shape) == 0 or len(predicted) != len(expected):
        raise DataError(
            f"predictions have shape {predicted.shape}, references {expected.shape}",
            fix="Pass one prediction per reference.",
        )
    if task is Task.REGRESSION:
        return _value_rows(predicted, expected)
    if task is Task.MULTILABEL:
        rows = _multilabel_rows(predicted, expected, scores, thresholds)
    else:
        rows = _class_rows(predicted, expected, scores, limit=2 if task is Task.BINARY else None)
        if decisions is None and thresholds is not None and rows.probabilities is not None:
            decisions = choose_labels(rows.probabilities, task, thresholds)
    return rows if decisions is None else replace(rows, decisions=np.asarray(decisions))


def softmax(logits: Array) -> Array:
    """Return probabilities along the last axis; safe for large logits."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logits: Array) -> Array:
    """Return the probability of 1; safe for large logits."""
    result: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return result


def _class_rows(predicted: Array, expected: Array, scores: Scale, *, limit: int | None) -> Rows:
    expected = _ids(_flat(expected), "reference")
    predicted = _flat(predicted)
    keep = ~np.isin(expected, IGNORED_LABELS)
    predicted, expected = predicted[keep], expected[keep]
    sound = not np.isnan(predicted).any()
    probabilities = None
    if predicted.ndim == 2:
        outputs = predicted.shape[1]
        limit = limit if limit is not None and outputs == limit else outputs
        decisions = predicted.argmax(axis=1) if len(predicted) else np.zeros(0, np.int64)
        if sound and len(predicted):
            probabilities = (
                softmax(predicted.astype(np.float64)) if scores == "logits" else predicted.astype(np.float64)
            )
    elif not sound:
        decisions = np.zeros(len(predicted), np.int64)
    else:
        decisions = _ids(predicted, "prediction")
    for what, ids in (("reference", expected), ("prediction", decisions)):
        if len(ids) and (ids.min() < 0 or (limit is not None and ids.max() >= limit)):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            top = f"0 to {limit - 1}" if limit is not None else "0 or more"
            raise DataError(f"{what} {bad} is not a label id ({top}; -1 = unlabeled)")
    return Rows(expected, decisions, probabilities, sound)


def _multilabel_rows(
    predicted: Array, expected: Array, scores: Scale, thresholds: Sequence[float] | None = None
) -> Rows:
    if predicted.shape != expected.shape or expected.ndim != 2:
        if expected.size == 0:
            return Rows(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64), None)
        raise DataError(f"a multilabel task needs (rows, labels) twice, got {predicted.shape} and {expected.shape}")
    keep = ~(np.isnan(expected).any(axis=1) | (expected < 0).any(axis=1))
    predicted, expected = predicted[keep], expected[keep]
    if not np.isin(expected, (0, 1)).all():
        raise DataError("multilabel references must be 0 or 1")
    expected = expected.astype(np.int64)
    if predicted.dtype.kind in "biu":
        return Rows(expected, (predicted > 0).astype(np.int64), None)
    probabilities = sigmoid(predicted) if scores == "logits" else predicted
    chosen = choose_labels(probabilities, Task.MULTILABEL, thresholds).astype(np.int64)
    return Rows(expected, chosen, probabilities, not np.isnan(predicted).any())


def _value_rows(predicted: Array, expected: Array) -> Rows:
    predicted, expected = _flat(predicted).astype(np.float64), _flat(expected).astype(np.float64)
    if predicted.ndim != 1 or expected.ndim != 1:
        raise DataError(f"a regression task needs one value per example, got {predicted.shape} and {expected.shape}")
    keep = ~np.isnan(expected)
    predicted, expected = predicted[keep], expected[keep]
    return Rows(expected, predicted, None, bool(np.isfinite(predicted).all() and np.isfinite(expected).all()))


def _flat(array: Array) -> Array:
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _ids(array: Array, what: str) -> Array:
    if array.ndim != 1:
        raise DataError(f"{what}s must be one label id per example, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), UNLABELED, array)
        if (array != np.round(array)).any():
            raise DataError(f"{what}s must be label ids or (rows, classes) scores, got fractions in one column")
    result: Array = array.astype(np.int64)
    return result


def confusion_matrix(references: Array, decisions: Array, *, num_classes: int | None = None) -> Array:
    """Return counts (k, k): row = true class, column = predicted class."""
    references, decisions = np.asarray(references, np.int64), np.asarray(decisions, np.int64)
    if num_classes is None:
        num_classes = int(max(references.max(initial=0), decisions.max(initial=0))) + 1
    flat = np.bincount(references * num_classes + decisions, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def counts_of(rows: Rows) -> Array:
    """Return the confusion matrix of single-label rows, at least 2x2."""
    width = 2 if rows.probabilities is None else rows.probabilities.shape[1]
    highest = max(rows.references.max(initial=0), rows.decisions.max(initial=0))
    return confusion_matrix(rows.references, rows.decisions, num_classes=max(width, int(highest) + 1))


Formula = Callable[[Array, Array, Array], Array]
"""A score from (hits, true rows, predicted rows) of each class, with classes in the last axis."""


def sums_of(counts: Array) -> tuple[Array, Array, Array]:
    """Return hits, true rows and predicted rows of each class from confusion matrices (..., k, k), true classes in rows."""
    return np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1), counts.sum(-2)


def _ratio(top: Array, bottom: Array) -> Array:
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    result: Array = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    return result


def _mean_defined(values: Array) -> Array:
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(-1), defined.sum(-1))


def per_class_f1(hits: Array, true: Array, predicted: Array) -> Array:
    """Return F1 of each class; NaN for a class neither present nor predicted."""
    return _ratio(2 * hits, true + predicted)


def accuracy(hits: Array, true: Array, predicted: Array) -> Array:
    """Return the share of right rows."""
    return _ratio(hits.sum(-1), true.sum(-1))


def f1(hits: Array, true: Array, predicted: Array) -> Array:
    """Return F1 of label 1, as GLUE defines it; undefined when label 1 is neither present nor predicted."""
    return per_class_f1(hits, true, predicted)[..., 1]


def precision(hits: Array, true: Array, predicted: Array) -> Array:
    """Return the share of rows predicted 1 that are 1; undefined when none is predicted."""
    return _ratio(hits[..., 1], predicted[..., 1])


def recall(hits: Array, true: Array, predicted: Array) -> Array:
    """Return the share of rows of label 1 that are predicted 1; undefined if there are none."""
    return _ratio(hits[..., 1], true[..., 1])


def f1_macro(hits: Array, true: Array, predicted: Array) -> Array:
    """Return the mean F1 of the classes present or predicted, as scikit-learn's average="macro"."""
    return _mean_defined(per_class_f1(hits, true, predicted))


def f1_weighted(hits: Array, true: Array, predicted: Array) -> Array:
    """Return F1 of the classes, weighted by how many rows each truly has."""
    return _ratio((np.nan_to_num(per_class_f1(hits, true, predicted)) * true).sum(-1), true.sum(-1))


def balanced_accuracy(hits: Array, true: Array, predicted: Array) -> Array:
    """Return the mean recall of the classes truly present."""
    return _mean_defined(_ratio(hits, true))


def matthews_correlation(hits: Array, true: Array, predicted: Array) -> Array:
    """Return MCC (Gorodkin's for more than two classes). It is 0 if one class is predicted, and undefined if only one is true."""
    n = true.sum(-1, dtype=np.float64)
    covariance = hits.sum(-1) * n - (true * predicted).sum(-1)
    true_spread, predicted_spread = n**2 - (true**2).sum(-1), n**2 - (predicted**2).sum(-1)
    value = _ratio(covariance, np.sqrt(np.maximum(true_spread * predicted_spread, 0)))
    return np.where((true_spread > 0) & (predicted_spread <= 0), 0.0, value)


def auroc_parts(positive: Array, score: Array) -> tuple[float, Array]:
    """Return the area under the ROC curve and each row's influence on it (DeLong); NaN when a side is empty. Ties count half."""
    positive = np.asarray(positive, bool)
    m, n = int(positive.sum()), int((~positive).sum())
    if m == 0 or n == 0:
        return float("nan"), np.zeros(len(positive))
    ranks = mean_ranks(score)
    own = np.empty(len(positive))
    own[positive], own[~positive] = mean_ranks(score[positive]), mean_ranks(score[~positive])
    placement = np.where(positive, (ranks - own) / n, 1.0 - (ranks - own) / m)
    area = float(placement[positive].mean())
    # m-1, n-1: the unbiased variance, which matters with 50 positives.
    scale = np.where(positive, m * max(m - 1, 1), n * max(n - 1, 1))
    return area, (placement - area) / np.sqrt(scale)


def log_odds(probabilities: Array) -> Array:
    """Return evidence for label 1 against label 0: keeps the order of rows whose probability rounds to 1.0."""
    with np.errstate(divide="ignore"):
        result: Array = np.log(probabilities[:, 1]) - np.log(probabilities[:, 0])
    # Infinities tie at the ends; scikit-learn refuses them.
    return np.nan_to_num(result)


def _mean_auroc(positive: Array, scores: Array) -> tuple[float, Array]:
    """Return the mean area over the columns, with each row's influence; NaN unless every column has both sides."""
    parts = [auroc_parts(positive[:, c], scores[:, c]) for c in range(scores.shape[1])]
    return float(np.mean([area for area, _ in parts])), np.mean([influence for _, influence in parts], axis=0)


def f1_micro_labels(rows: Rows) -> float:
    """Return F1 over all row-label cells; NaN when nothing is true and nothing predicted."""
    total = int(rows.references.sum() + rows.decisions.sum())
    return 2 * int((rows.references & rows.decisions).sum()) / total if total else math.nan


def f1_macro_labels(rows: Rows) -> float:
    """Return the mean F1 of the labels true or predicted at least once; scikit-learn counts other labels as 0."""
    true, predicted = rows.references, rows.decisions
    hits, true, predicted = (found.sum(axis=0) for found in (true & predicted, true, predicted))
    return float(f1_macro(hits, true, predicted))


def pearson(references: Array, predictions: Array) -> float:
    """Return the linear correlation; NaN under two rows or when one side is constant."""
    if len(references) < 2 or np.ptp(references) == 0 or np.ptp(predictions) == 0:
        return float("nan")
    # Scaled first, so that very large or very small values do not over- or underflow when squared.
    x, y = ((values - values.mean()) / np.abs(values - values.mean()).max() for values in (references, predictions))
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearmanr(references: Array, predictions: Array) -> float:
    """Return the rank correlation, ties at their mean rank; NaN if `pearson` would be NaN."""
    return pearson(mean_ranks(references), mean_ranks(predictions))


def r2(references: Array, predictions: Array) -> float:
    """Return the share of the references' variance explained; NaN under two rows or without variance."""
    if len(references) < 2 or np.ptp(references) == 0:
        return float("nan")
    return float(1.0 - np.mean((references - predictions) ** 2) / np.var(references))


Interval = Callable[[Rows, float], Limits | None]
"""Rows and value -> limits; None if the rows are too few or constant."""

SINGLE = frozenset({Task.BINARY, Task.MULTICLASS})
BINARY = frozenset({Task.BINARY})
MULTILABEL = frozenset({Task.MULTILABEL})
REGRESSION = frozenset({Task.REGRESSION})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of some tasks. A name occurs twice if tasks define it differently."""

    name: str
    tasks: frozenset[Task]
    help: str
    value: Callable[[Rows], float]
    interval: Interval
    method: str
    """Method of the interval, as reported."""
    greater_is_better: bool = True
    aliases: tuple[str, ...] = ()
    formula: Formula | None = None
    """The value from the counts of each class, if it depends only on them."""
    counts_right_rows: bool = False
    """True for the share of correct rows: two models are then compared by McNemar's test."""

    def measure(self, rows: Rows) -> float | None:
        """Return the value, or None if it is undefined on these rows."""
        value = self.value(rows) if len(rows) and rows.sound else math.nan
        return value if math.isfinite(value) else None

    def score(self, rows: Rows) -> Score:
        """Return the value with its interval."""
        value = self.measure(rows)
        if value is None:
            return Score(None, None, None, len(rows), "none")
        found = self.interval(rows, value)
        if found is None:
            return Score(value, None, None, len(rows), "none: too few or constant rows")
        # Rounding may put a limit slightly on the wrong side of the value.
        return Score(value, min(found[0], value), max(found[1], value), len(rows), self.method)


_WILSON, _EFFECTIVE = "wilson", "wilson at effective n"
_LOG, _FISHER, _SHARE = "jackknife, log scale", "jackknife, Fisher z", "jackknife, wilson at effective n"


def _count(name: str, help: str, formula: Formula, interval: Interval | None = None, **more: Any) -> Metric:
    """Return a metric of the counts of classes, of single-label tasks by default; without an interval, that of its counts."""
    floor = -1.0 if formula is matthews_correlation else 0.0
    return Metric(
        name,
        more.pop("tasks", SINGLE),
        help,
        lambda rows: float(formula(*sums_of(counts_of(rows)))),
        interval or (lambda rows, value: count_limits(formula, counts_of(rows), value, floor)),
        more.pop("method", _EFFECTIVE if interval is None else _WILSON),
        formula=formula,
        **more,
    )


def _left_out(
    name: str,
    tasks: frozenset[Task],
    help: str,
    value: Callable[[Rows], float],
    limits: Callable[[float, float, int], Limits | None],
    method: str,
    **more: Any,
) -> Metric:
    """Return a metric whose standard error is that of the jackknife; `limits` has its scale."""
    return Metric(
        name,
        tasks,
        help,
        value,
        lambda rows, found: limits(found, jackknife_error(value, rows), len(rows)),
        method,
        **more,
    )


def _numbers(formula: Callable[[Array, Array], float]) -> Callable[[Rows], float]:
    return lambda rows: formula(rows.references, rows.decisions)


def _of_f1(rows: Rows, value: float) -> Limits:
    low, high = f1_limits(value / (2 - value), float(((rows.references == 1) | (rows.decisions == 1)).sum()))
    return float(low), float(high)


def _auroc(rows: Rows) -> tuple[float, Array]:
    """Return AUROC of one class against the rest (two classes: label 1), or of each label of a multilabel task, with each
    row's influence."""
    if rows.probabilities is None:
        return math.nan, np.zeros(len(rows))
    if rows.references.ndim == 2:
        return _mean_auroc(rows.references == 1, rows.probabilities)
    if rows.probabilities.shape[1] == 2:
        return auroc_parts(rows.references == 1, log_odds(rows.probabilities))
    return _mean_auroc(rows.references[:, None] == np.arange(rows.probabilities.shape[1]), rows.probabilities)


def _of_auroc(rows: Rows, value: float) -> Limits:
    assert rows.probabilities is not None
    many, classes = rows.references.ndim == 2, rows.probabilities.shape[1]
    rarest = len(rows) if many else np.bincount(rows.references, minlength=classes).min()
    influence = _auroc(rows)[1]
    return share_limits(value, float(np.linalg.norm(influence)), float(rarest))


def _average_precision(rows: Rows) -> float:
    """Return the area under the precision-recall steps; NaN without positives."""
    positive = rows.references == 1
    if rows.probabilities is None or not positive.any():
        return math.nan
    scores = log_odds(rows.probabilities)
    order = np.argsort(-scores, kind="stable")
    last_of_tie = np.append(np.diff(scores[order]) != 0, True)
    hits = np.cumsum(positive[order])[last_of_tie]
    return float(np.diff(hits, prepend=0) @ (hits / (np.flatnonzero(last_of_tie) + 1)) / hits[-1])


def _of_average_precision(rows: Rows, value: float) -> Limits:
    return share_limits(value, jackknife_error(_average_precision, rows), float((rows.references == 1).sum()))


def _log_loss(rows: Rows) -> float:
    """Return the mean of minus the log probability of the true class; probabilities are at least 1e-15."""
    if rows.probabilities is None:
        return math.nan
    own = np.take_along_axis(rows.probabilities, rows.references[:, None], axis=1)[:, 0]
    return float(-np.log(np.clip(own / rows.probabilities.sum(axis=1), 1e-15, 1.0)).mean())


METRICS: tuple[Metric, ...] = (
    _count("accuracy", "Share of rows with the right label.", accuracy, lambda rows, v: wilson_pair(v, len(rows)),
           aliases=("acc",), counts_right_rows=True),
    _count("f1", "Harmonic mean of precision and recall of label 1, as in GLUE.", f1, _of_f1, tasks=BINARY,
           method="wilson given TP+FP+FN"),
    _count("precision", "Share of rows predicted 1 that are 1.", precision,
           lambda rows, v: wilson_pair(v, (rows.decisions == 1).sum()), tasks=BINARY),
    _count("recall", "Share of rows that are 1 and predicted 1.", recall,
           lambda rows, v: wilson_pair(v, (rows.references == 1).sum()), tasks=BINARY),
    _count("f1_macro", "Mean F1 of the classes.", f1_macro, aliases=("macro_f1",)),
    _count("f1_weighted", "F1 of the classes, weighted by their rows.", f1_weighted, aliases=("weighted_f1",)),
    _count("balanced_accuracy", "Mean recall of the classes that are present.", balanced_accuracy),
    _count("matthews_correlation", "Correlation of true and predicted classes (MCC).", matthews_correlation,
           aliases=("mcc", "matthews")),
    Metric("auroc", SINGLE, "Area under the ROC curve; one class against the rest, mean over classes.",
           lambda rows: _auroc(rows)[0], _of_auroc, f"DeLong, {_EFFECTIVE}", aliases=("roc_auc", "auc")),
    Metric("average_precision", BINARY, "Area under the steps of the precision-recall curve of label 1.",
           _average_precision, _of_average_precision, _SHARE),
    _left_out("log_loss", SINGLE, "Mean of minus the log probability of the right label.", _log_loss, positive_limits, _LOG,
              greater_is_better=False),
    _left_out("f1_macro", MULTILABEL, "Mean F1 of the labels.", f1_macro_labels, share_limits, _SHARE),
    _left_out("f1_micro", MULTILABEL, "F1 over all cells of rows and labels.", f1_micro_labels, share_limits, _SHARE,
              aliases=("micro_f1",)),
    Metric("auroc", MULTILABEL, "Area under the ROC curve, mean over labels.", lambda rows: _auroc(rows)[0], _of_auroc,
           f"DeLong, {_EFFECTIVE}"),
    Metric("subset_accuracy", MULTILABEL, "Share of rows with every label right.",
           lambda rows: float((rows.references == rows.decisions).all(axis=1).mean()),
           lambda rows, value: wilson_pair(value, len(rows)), _WILSON, counts_right_rows=True),
    _left_out("pearson", REGRESSION, "Linear correlation.", _numbers(pearson), correlation_limits, _FISHER,
              aliases=("pearsonr",)),
    _left_out("spearmanr", REGRESSION, "Rank correlation.", _numbers(spearmanr), correlation_limits, _FISHER,
              aliases=("spearman",)),
    _left_out("mse", REGRESSION, "Mean squared error.", _numbers(lambda x, y: float(np.square(x - y).mean())),
              positive_limits, _LOG, greater_is_better=False),
    _left_out("mae", REGRESSION, "Mean absolute error.", _numbers(lambda x, y: float(np.abs(x - y).mean())),
              positive_limits, _LOG, greater_is_better=False),
    _left_out("r2", REGRESSION, "Share of the variance that is explained.", _numbers(r2), r2_limits, _LOG),
)  # fmt: skip
"""In the order in which names are listed."""


LOWER_IS_BETTER = ("loss", "mse", "rmse", "mae", "brier", "ece", "error")
"""Names, or endings of names, of metrics outside of the table for which smaller is better."""

DEFAULTS: dict[Task, tuple[str, ...]] = {
    Task.BINARY: ("accuracy", "f1", "precision", "recall", "f1_macro", "matthews_correlation", "auroc"),
    Task.MULTICLASS: ("accuracy", "f1_macro", "f1_weighted", "balanced_accuracy", "matthews_correlation", "auroc"),
    Task.MULTILABEL: ("f1_micro", "f1_macro", "subset_accuracy", "auroc"),
    Task.REGRESSION: ("pearson", "spearmanr", "mse", "mae", "r2"),
}

GLUE: dict[str, tuple[Task, tuple[str, ...]]] = {
    **dict.fromkeys(("sst2", "qnli", "rte", "wnli", "hans"), (Task.BINARY, ("accuracy",))),
    **dict.fromkeys(("mnli", "mnli_matched", "mnli_mismatched", "ax"), (Task.MULTICLASS, ("accuracy",))),
    **dict.fromkeys(("mrpc", "qqp"), (Task.BINARY, ("accuracy", "f1"))),
    "cola": (Task.BINARY, ("matthews_correlation",)),
    "stsb": (Task.REGRESSION, ("pearson", "spearmanr")),
}
"""GLUE task -> its label kind and the keys `evaluate`'s glue metric reports."""


def metric_names(task: Task | None = None) -> tuple[str, ...]:
    """Return the metrics of a task, or of all tasks."""
    return tuple(dict.fromkeys(m.name for m in METRICS if task is None or task in m.tasks))


def metric_aliases() -> dict[str, str]:
    """Alias -> name under which a metric is reported."""
    return {alias: m.name for m in METRICS for alias in m.aliases}


def canonical_name(name: str) -> str:
    """Return the key of a metric: aliases resolved, without the prefix `eval_`, `test_` or `predict_`."""
    plain = name.strip().lower().replace("-", "_")
    for prefix in ("eval_", "test_", "predict_"):
        plain = plain.removeprefix(prefix)
    return metric_aliases().get(plain, plain)


def greater_is_better(name: str) -> bool:
    """Return whether larger is better; names outside of the table are judged by their ending."""
    for metric in METRICS:
        if metric.name == name:
            return metric.greater_is_better
    return not any(name == ending or name.endswith(f"_{ending}") for ending in LOWER_IS_BETTER)


def metric_of(name: str, task: Task) -> Metric:
    """Return the metric with this name or alias for this task; other names are a ConfigError."""
    plain, known = canonical_name(name), metric_names(task)
    for metric in METRICS:
        if metric.name == plain and task in metric.tasks:
            return metric
    choices = f"Metrics of a {task.value} task: {', '.join(known)}"
    if plain in metric_names():
        instead = {"f1": " Use 'f1_macro'.", "f1_micro": " Use 'accuracy', which is equal."}.get(plain, "")
        raise ConfigError(f"metric {name!r} is not defined for a {task.value} task", fix=f"{choices}.{instead}")
    hit = nearest(plain, [*known, *(alias for alias, metric in metric_aliases().items() if metric in known)])
    hint = f"Did you mean {hit!r}? " if hit else ""
    raise ConfigError(f"unknown metric {name!r}", fix=f"{hint}{choices}")


def resolve_glue(name: str) -> tuple[Task, tuple[str, ...]]:
    """Return task and metric names of a GLUE task; `sst-2`, `STS-B`, `mnli-mm` are understood."""
    plain = name.strip().lower().replace("-", "_")
    plain = {"sst_2": "sst2", "sts_b": "stsb", "mnli_m": "mnli_matched", "mnli_mm": "mnli_mismatched"}.get(plain, plain)
    if plain not in GLUE:
        hit = nearest(plain, list(GLUE))
        hint = f"Did you mean {hit!r}? " if hit else ""
        raise ConfigError(f"unknown GLUE task {name!r}", fix=f"{hint}Known tasks: {', '.join(GLUE)}")
    return GLUE[plain]


OF_ONE_CLASS = ("f1", "precision", "recall", "average_precision")
"""Binary metrics that refer to label 1 only."""

logger = logging.getLogger(__name__)


class Suite:
    """Named metrics of one task. `names` is the order they are reported in."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        *,
        scores: Scale = "logits",
        positive_name: str | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.task = task
        self.metrics = {metric.name: metric for metric in (metric_of(name, task) for name in names)}
        self.names = tuple(self.metrics)
        self.positive_name = positive_name if task is Task.BINARY else None
        self.scores = scores
        self.thresholds = thresholds
        self._predictions: list[Array] = []
        self._references: list[Array] = []

    @property
    def metric_for_best_model(self) -> str:
        """Return the default metric for the best checkpoint: the first one."""
        return self.names[0]

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float | None]:
        """Return metric -> value over the added rows and those passed here; forgets the added rows, as `evaluate` does."""
        rows = self._take(predictions, references)
        return {name: metric.measure(rows) for name, metric in self.metrics.items()}

    def compute_with_intervals(
        self,
        predictions: Any = None,
        references: Any = None,
        *,
        decisions: Any = None,
    ) -> dict[str, Score]:
        """Return metric -> value with n and interval, over the same rows as `compute`; `decisions` as in `make_rows`."""
        rows = self._take(predictions, references)
        rows = rows if decisions is None else replace(rows, decisions=to_numpy(decisions))
        found = {name: metric.score(rows) for name, metric in self.metrics.items()}
        return {k: replace(v, of=self.positive_name) if k in OF_ONE_CLASS else v for k, v in found.items()}

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add rows. Shapes that don't match are refused immediately."""
        batch, expected = to_numpy(predictions), to_numpy(references)
        make_rows(batch, expected, task=self.task, scores=self.scores, thresholds=self.thresholds)
        if len(batch):
            self._predictions.append(batch)
            self._references.append(expected)

    def _take(self, predictions: Any, references: Any) -> Rows:
        if (predictions is None) != (references is None):
            raise ConfigError("predictions and references go together", where="compute", fix="Pass both or neither.")
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        empty = [np.zeros(0)]
        joined = np.concatenate(self._predictions or empty), np.concatenate(self._references or empty)
        self._predictions, self._references = [], []
        rows = make_rows(*joined, task=self.task, scores=self.scores, thresholds=self.thresholds)
        if not rows.sound:
            logger.warning("some of %d predictions are NaN or infinite: every metric is undefined", len(rows))
        return rows


def make_suite(
    task: Task,
    *,
    names: Sequence[str] | None = None,
    glue_task: str | None = None,
    scores: Scale = "logits",
    positive_name: str | None = None,
    thresholds: Sequence[float] | None = None,
) -> Suite:
    """Return the metrics of a task: `names` if set, else those of the GLUE task, else the usual ones, main metric first.

    `positive_name` is the name of label 1, for scores that refer to that class. `thresholds` as in a LabelMap.
    """
    chosen: Sequence[str] = DEFAULTS[task]
    if glue_task is not None:
        expected, chosen = resolve_glue(glue_task)
        if (expected is Task.REGRESSION) != (task is Task.REGRESSION) or task is Task.MULTILABEL:
            raise ConfigError(
                f"GLUE {glue_task} is a {expected.value} task, the data is {task.value}", fix="Check the label column."
            )
    if names:
        chosen = names
    return Suite(task, chosen, scores=scores, positive_name=positive_name, thresholds=thresholds)


def load_metric(path: str, config_name: str | None = None) -> Suite:
    """`load_metric("glue", "mrpc")` or `load_metric("f1")`, as `evaluate.load`, without the network."""
    if path == "glue":
        if config_name is None:
            raise ConfigError(
                "the glue metric needs the name of its task", fix='For example load_metric("glue", "mrpc").'
            )
        task, names = resolve_glue(config_name)
        return Suite(task, names)
    name = canonical_name(path)
    order = (Task.MULTICLASS, Task.BINARY, Task.REGRESSION, Task.MULTILABEL)
    task = next((t for t in order if name in metric_names(t)), Task.BINARY)
    return Suite(task, (name,))
