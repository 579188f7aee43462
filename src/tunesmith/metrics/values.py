"""The values of metrics: single-label ones, those of 0/1 vectors (rows, labels), those of one number a row.

Metrics of counts take confusion matrices (..., k, k), true class in rows. Those of 0/1 vectors give the influence of every row,
because the labels of one row are not independent. A value that is not defined is NaN; `Metric.measure` turns it into None.
"""

from __future__ import annotations

import numpy as np

from tunesmith.metrics.rows import Array, Rows, mean_ranks

AP_WORK = 8_000_000
"""Row draws spent on the standard error of average precision: 400 resamples up to 20,000 rows, never under 80."""


def confusion_matrix(references: Array, decisions: Array, *, num_classes: int | None = None) -> Array:
    """Counts (k, k): row = true class, column = predicted class."""
    references, decisions = np.asarray(references, np.int64), np.asarray(decisions, np.int64)
    if num_classes is None:
        num_classes = int(max(references.max(initial=0), decisions.max(initial=0))) + 1
    flat = np.bincount(references * num_classes + decisions, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def counts_of(rows: Rows) -> Array:
    """The confusion matrix of single-label rows, at least 2x2."""
    width = 2 if rows.probabilities is None else rows.probabilities.shape[1]
    highest = max(rows.references.max(initial=0), rows.decisions.max(initial=0))
    return confusion_matrix(rows.references, rows.decisions, num_classes=max(width, int(highest) + 1))


def seen_classes(counts: Array) -> Array:
    """The part of one confusion matrix whose classes are true or predicted somewhere."""
    seen = counts.sum(0) + counts.sum(1) > 0
    result: Array = counts[np.ix_(seen, seen)]
    return result


def _ratio(top: Array, bottom: Array) -> Array:
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    result: Array = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    return result


def _mean_defined(values: Array) -> Array:
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(-1), defined.sum(-1))


def _hits(counts: Array) -> Array:
    result: Array = np.diagonal(counts, axis1=-2, axis2=-1)
    return result


def per_class_f1(counts: Array) -> Array:
    """F1 of each class; NaN for a class neither present nor predicted."""
    return _ratio(2 * _hits(counts), counts.sum(-1) + counts.sum(-2))


def accuracy(counts: Array) -> Array:
    """Share of rows on the diagonal."""
    return _ratio(_hits(counts).sum(-1), counts.sum((-1, -2)))


def f1(counts: Array) -> Array:
    """F1 of label 1, as GLUE defines it; undefined when label 1 is neither present nor predicted."""
    return per_class_f1(counts)[..., 1]


def precision(counts: Array) -> Array:
    """Share of rows predicted 1 that are 1; undefined when none is predicted."""
    return _ratio(counts[..., 1, 1], counts[..., :, 1].sum(-1))


def recall(counts: Array) -> Array:
    """Share of rows that are 1 predicted 1; undefined when there are none."""
    return _ratio(counts[..., 1, 1], counts[..., 1, :].sum(-1))


def f1_macro(counts: Array) -> Array:
    """Mean F1 of the classes present or predicted, as scikit-learn's average="macro"."""
    return _mean_defined(per_class_f1(counts))


def f1_weighted(counts: Array) -> Array:
    """F1 of the classes, weighted by how many rows each truly has."""
    scores = per_class_f1(counts)
    return _ratio((np.nan_to_num(scores) * counts.sum(-1)).sum(-1), counts.sum((-1, -2)))


def _macro(top: Array, own: Array, other: Array) -> Array:
    # A class present on the other side only counts as 0, a class on neither side does not count (scikit-learn).
    values = np.where((own == 0) & (other > 0), 0.0, _ratio(top, own))
    return _mean_defined(values)


def precision_macro(counts: Array) -> Array:
    """Mean precision; a class never predicted counts as 0."""
    return _macro(_hits(counts), counts.sum(-2), counts.sum(-1))


def recall_macro(counts: Array) -> Array:
    """Mean recall; a class predicted but never true counts as 0."""
    return _macro(_hits(counts), counts.sum(-1), counts.sum(-2))


def balanced_accuracy(counts: Array) -> Array:
    """Mean recall of the classes truly present."""
    return _mean_defined(_ratio(_hits(counts), counts.sum(-1)))


def matthews_correlation(counts: Array) -> Array:
    """MCC (Gorodkin's for more than two classes). One predicted class gives 0, one true class is undefined."""
    counts = counts.astype(np.float64)
    true, predicted, n = counts.sum(-1), counts.sum(-2), counts.sum((-1, -2))
    covariance = _hits(counts).sum(-1) * n - (true * predicted).sum(-1)
    true_spread, predicted_spread = n**2 - (true**2).sum(-1), n**2 - (predicted**2).sum(-1)
    value = _ratio(covariance, np.sqrt(true_spread * predicted_spread))
    return np.where((true_spread > 0) & (predicted_spread <= 0), 0.0, value)


def auroc_parts(positive: Array, score: Array) -> tuple[float, Array]:
    """Area under the ROC curve and each row's influence on it (DeLong); NaN when a side is empty. Ties count half."""
    positive = np.asarray(positive, bool)
    m, n = int(positive.sum()), int((~positive).sum())
    if m == 0 or n == 0:
        return float("nan"), np.zeros(len(positive))
    ranks = mean_ranks(score)
    own = np.empty(len(positive))
    own[positive], own[~positive] = mean_ranks(score[positive]), mean_ranks(score[~positive])
    placement = np.where(positive, (ranks - own) / n, 1.0 - (ranks - own) / m)
    area = float(placement[positive].mean())
    # m-1, n-1: the variance without bias, which shows at 50 positives.
    scale = np.where(positive, m * max(m - 1, 1), n * max(n - 1, 1))
    return area, (placement - area) / np.sqrt(scale)


def log_odds(probabilities: Array) -> Array:
    """Evidence for label 1 against label 0: keeps the order of rows whose probability rounds to 1.0."""
    with np.errstate(divide="ignore"):
        result: Array = np.log(probabilities[:, 1]) - np.log(probabilities[:, 0])
    # Infinities tie at the ends; scikit-learn refuses them.
    return np.nan_to_num(result)


def auroc_one_vs_rest(references: Array, probabilities: Array) -> tuple[float, Array]:
    """Mean area over the columns, with each row's influence. Two columns: label 1 only. NaN unless every class is there."""
    if probabilities.shape[1] == 2:
        return auroc_parts(references == 1, log_odds(probabilities))
    parts = [auroc_parts(references == c, probabilities[:, c]) for c in range(probabilities.shape[1])]
    return float(np.mean([area for area, _ in parts])), np.mean([influence for _, influence in parts], axis=0)


def average_precision(positive: Array, score: Array) -> float:
    """Area under the precision-recall steps, as scikit-learn; NaN without positives."""
    if not np.asarray(positive, bool).any():
        return float("nan")
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(positive, score))


def average_precision_variance(positive: Array, score: Array, seed: int) -> float:
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


def row_log_loss(references: Array, probabilities: Array) -> Array:
    """Minus the log probability of the true class, row by row; probabilities are held above 1e-15."""
    own = np.take_along_axis(probabilities, references[:, None], axis=1)[:, 0]
    result: Array = -np.log(np.clip(own / probabilities.sum(axis=1), 1e-15, 1.0))
    return result


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


def pearson(references: Array, predictions: Array) -> float:
    """Linear correlation; NaN under two rows or when one side is constant."""
    if len(references) < 2 or np.ptp(references) == 0 or np.ptp(predictions) == 0:
        return float("nan")
    x, y = references - references.mean(), predictions - predictions.mean()
    # Scaled first, so that very large or very small values do not over- or underflow when squared.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearmanr(references: Array, predictions: Array) -> float:
    """Rank correlation, ties at their mean rank; NaN where `pearson` would be."""
    return pearson(mean_ranks(references), mean_ranks(predictions))


def mse(references: Array, predictions: Array) -> float:
    """Mean squared error."""
    return float(np.mean((references - predictions) ** 2)) if len(references) else float("nan")


def mae(references: Array, predictions: Array) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(references - predictions))) if len(references) else float("nan")


def r2(references: Array, predictions: Array) -> float:
    """Share of the references' variance explained; NaN under two rows or without variance."""
    if len(references) < 2 or np.ptp(references) == 0:
        return float("nan")
    return float(1.0 - np.mean((references - predictions) ** 2) / np.var(references))
