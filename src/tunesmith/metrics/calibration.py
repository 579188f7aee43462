"""Properties of a model, from held-out examples: reliability bins, calibration error, a temperature of the logits, decision
thresholds, the share of wrong labels, and a confidence threshold under which the model abstains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.errors import DataError
from tunesmith.labels import Task, choose_labels
from tunesmith.metrics.evidence import row_losses
from tunesmith.metrics.table import IGNORED_LABELS, Array, make_suite, sigmoid, softmax, to_numpy, wilson_limits


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Rows whose top probability is in (low, high]; `accuracy` comes with its 95% interval."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


def reliability_bins(probabilities: Any, references: Any, *, num_bins: int = 15) -> tuple[ReliabilityBin, ...]:
    """Return the non-empty bins of equal width, lowest confidence first; () without labeled examples."""
    table, labels = _labeled(probabilities, references)
    if len(table) == 0:
        return ()
    top, right = table.max(axis=1), table.argmax(axis=1) == labels
    cuts = np.linspace(0.0, 1.0, num_bins + 1)
    # Right edges belong to a bin, so that a confidence of exactly 1.0 falls in the last one.
    where = np.clip(np.searchsorted(cuts, top, side="left") - 1, 0, max(len(cuts) - 2, 0))
    bins = []
    for index in np.unique(where):
        inside = where == index
        count, accuracy = int(inside.sum()), float(right[inside].mean())
        low, high = wilson_limits(accuracy, count)
        edge = float(cuts[index]), float(cuts[min(index + 1, len(cuts) - 1)])
        bins.append(ReliabilityBin(*edge, count, float(top[inside].mean()), accuracy, float(low), float(high)))
    return tuple(bins)


def expected_calibration_error(probabilities: Any, references: Any) -> float | None:
    """Return the mean gap of confidence and accuracy over equal-width bins, weighted by examples; None without labels."""
    bins = reliability_bins(probabilities, references)
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / total if total else None


def _labeled(probabilities: Any, references: Any) -> tuple[Array, Array]:
    """Return (n, classes) probabilities and ids of the labeled examples; a single column is the probability of label 1."""
    table, labels = to_numpy(probabilities).astype(np.float64), to_numpy(references)
    if table.ndim == 1:
        table = np.stack([1.0 - table, table], axis=1)
    keep = ~np.isin(labels, IGNORED_LABELS)
    table, labels = table[keep], labels[keep].astype(np.int64)
    return table, labels


FEWEST_ROWS = 30
FOLDS = 5
LIMITS = (0.1, 10.0)


@dataclass(frozen=True)
class Temperature:
    """`value` is fitted to all rows. The errors are cross-validated."""

    value: float
    loss_before: float
    loss_after: float
    error_before: float
    error_after: float
    rows: int

    def line(self) -> str:
        """Return the printed line."""
        return (
            f"temperature {self.value:.3g}: calibration error {self.error_before:.3f} -> {self.error_after:.3f}, log loss "
            f"{self.loss_before:.3f} -> {self.loss_after:.3f} on {self.rows:,} rows, each with the temperature of others"
        )


def fit_temperature(logits: Array, gold: Array, task: Task) -> Temperature | None:
    """Return None for regression, for too few rows, and if the cross-validated log loss doesn't improve."""
    if task is Task.REGRESSION:
        return None
    known = (gold >= 0).all(axis=1) if gold.ndim == 2 else gold >= 0
    logits, gold = np.asarray(logits, dtype=np.float64)[known], gold[known].astype(np.int64)
    if len(gold) < FEWEST_ROWS:
        return None
    fold = np.random.default_rng(0).permutation(len(gold)) % FOLDS
    heat = np.empty(len(gold))
    for k in range(FOLDS):
        heat[fold == k] = _fit_temperature(logits[fold != k], gold[fold != k])
    after, before = log_loss_of(logits / heat[:, None], gold), log_loss_of(logits, gold)
    if after >= before:
        return None
    worse, better = _calibration(logits, gold), _calibration(logits / heat[:, None], gold)
    return Temperature(_fit_temperature(logits, gold), before, after, worse, better, len(gold))


def log_loss_of(logits: Array, gold: Array) -> float:
    """Return the mean of -log p of the label; of each label if an example may have several."""
    return float(row_losses(Task.MULTILABEL if gold.ndim == 2 else Task.MULTICLASS, logits, gold).mean())


def _fit_temperature(logits: Array, gold: Array) -> float:
    from scipy.optimize import minimize_scalar

    low, high = np.log(LIMITS)
    found = minimize_scalar(lambda t: log_loss_of(logits / np.exp(t), gold), bounds=(low, high), method="bounded")
    return float(np.exp(found.x))


def _calibration(logits: Array, gold: Array) -> float:
    if gold.ndim == 2:
        return expected_calibration_error(sigmoid(logits).ravel(), gold.ravel()) or 0.0
    return expected_calibration_error(softmax(logits), gold) or 0.0


DRAWS = 200
FEWEST_OF_A_LABEL = 10
"""Minimum number of rows with the label, and of rows without it: with fewer, a threshold would fit noise."""
EXPONENTS = tuple(k / 10 for k in range(16))
ERRORS = 2.0
"""A gain must be this many times its standard error: by chance, one run in forty moves a threshold (with 1: one in six)."""


@dataclass(frozen=True)
class MovedThresholds:
    """`after` is the cross-validated score with thresholds; `error` is the bootstrap standard error of the gain.

    `thresholds` are fitted to all rows; None if the gain is not significant.
    """

    thresholds: tuple[float, ...] | None
    metric: str
    before: float
    after: float
    error: float
    rows: int
    decisions: Array | None = field(default=None, compare=False)
    """Cross-validated decisions for the labeled rows; None if thresholds are not moved."""

    def line(self, what: str = "validation") -> str:
        """Return the printed line."""
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

    Returns None for regression, and for too few rows of the rarest label.
    """
    known = (gold >= 0).all(axis=1) if gold.ndim == 2 else gold >= 0
    probabilities, gold = np.asarray(probabilities, dtype=np.float64)[known], gold[known].astype(np.int64)
    if task is Task.REGRESSION or not len(gold) or _fewest(gold, probabilities.shape[1]) < FEWEST_OF_A_LABEL:
        return None
    rng = np.random.default_rng(seed)
    fold = rng.permutation(len(gold)) % FOLDS
    plain, moved = choose_labels(probabilities, task), np.empty_like(choose_labels(probabilities, task))
    for k in range(FOLDS):
        fitted = _fit_thresholds(probabilities[fold != k], gold[fold != k], task)
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
    kept = _fit_thresholds(probabilities, gold, task) if moves else None
    return MovedThresholds(kept, metric, before, after, error, len(gold), moved.astype(np.int64) if moves else None)


def _fewest(gold: Array, labels: int) -> int:
    if gold.ndim == 2:
        counts = gold.sum(axis=0)
        return int(np.minimum(counts, len(gold) - counts).min())
    return int(np.bincount(gold, minlength=labels).min())


def _fit_thresholds(probabilities: Array, gold: Array, task: Task) -> tuple[float, ...]:
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
    """Return the threshold with the best F1, midway between two scores."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + max(int(positive.sum()), 1))
    at = int(np.argmax(f1))
    below = scores[order[at + 1]] if at + 1 < len(order) else 0.0
    return float(np.clip((scores[order[at]] + below) / 2, 1e-6, 1 - 1e-6))


# --- label noise ------------------------------------------------------------------------------------------------------

# The share of wrong training labels, estimated from predictions of a model that has not seen the examples. A label is
# drawn from a softmax of the scores with probability 1 - share, and is a random other label otherwise. If labels are
# wrong, the error rate does not fall below `share` however confident the model is; if a task is hard, it falls with the
# confidence. The scale of the scores, a bias per class and the share are fitted together; the interval comes from the
# profile likelihood. Validation examples have their own share: if they have fewer errors, they determine the scale, and
# the interval is narrow.

SHARES = np.arange(0.0, 0.61, 0.02)
DROP = 2.7
"""How far the log-likelihood may fall inside the interval. 1.92 would be 95% for an exact model; hard tasks are not."""
LEAST_GAIN = 10.0
"""Log-likelihood by which the scores must explain the labels better than class frequencies. With less, there is no estimate."""
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
        """Return the negative log-likelihood and gradient by log scale, biases, and the logit of the other samples' shares."""
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
        p = softmax(logits)
        right = p[np.arange(len(p)), self.labels]
        mixed = np.maximum((1 - wrong) * right + wrong / others * (1 - right), 1e-12)
        weight = (1 - wrong - wrong / others) * right / mixed
        by_logit = weight[:, None] * (self.targets - p)
        by_free = np.concatenate([[(by_logit * scaled).sum()], by_logit.sum(axis=0)])
        by_wrong = float((((1 - right) / others - right) / mixed).sum())
        return float(np.log(mixed).sum()), by_free, by_wrong


# --- abstaining -------------------------------------------------------------------------------------------------------

CONFIDENCE = 0.95
STEPS, FIRST_SHARE, FIRST_ERRORS = 20, 0.2, (3, 2, 1, 0)
"""Thresholds that are tested after the first one. That one answers at least this share of the examples, and enough to pass with 3
errors, or with fewer if that requires more than half of them (docs/research/abstain.md)."""
MOST_EXAMPLES = 20_000
"""Held-out examples that are stored with a model."""


@dataclass(frozen=True)
class HeldOut:
    """The confidence (largest probability), predicted class and correctness of held-out examples."""

    confidence: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.int64]
    correct: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any], labels: npt.NDArray[Any]) -> HeldOut:
        """Take the labeled examples (label ids of at least 0) of a table of probabilities, one column per class."""
        known = np.flatnonzero(labels >= 0)[:MOST_EXAMPLES]
        table = np.asarray(probabilities, dtype=np.float64)[known]
        predicted = np.asarray(predicted, dtype=np.int64)[known]
        return cls(confidence_of(table, predicted), predicted, predicted == labels[known])

    def to_json(self) -> dict[str, list[Any]]:
        """Return plain lists."""
        return {
            "confidence": [round(float(value), 7) for value in self.confidence],
            "predicted": self.predicted.tolist(),
            "correct": self.correct.astype(int).tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeldOut:
        """Return the object that `to_json` described."""
        columns = [np.asarray(data[name]) for name in ("confidence", "predicted", "correct")]
        if len({len(column) for column in columns}) != 1 or any(column.ndim != 1 for column in columns):
            raise ValueError("the columns have different lengths")
        return cls(columns[0].astype(np.float64), columns[1].astype(np.int64), columns[2].astype(bool))


def confidence_of(probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the probability of the predicted class of each example, rounded so that equal inputs compare equal."""
    table = np.asarray(probabilities, dtype=np.float64)
    found: npt.NDArray[np.float64] = np.round(np.take_along_axis(table, predicted[:, None], axis=1)[:, 0], 7)
    return found


@dataclass(frozen=True)
class Abstention:
    """An example is answered if its confidence is at least the threshold of its predicted class."""

    max_error: float
    thresholds: tuple[float, ...]
    """One per class; infinity: this class is never answered."""
    answered: int
    errors: int
    examples: int
    """Held-out examples, and how many of them are answered and answered wrongly."""

    def answers(self, probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which examples to answer."""
        limits = np.asarray(self.thresholds)[predicted]
        found: npt.NDArray[np.bool_] = confidence_of(np.asarray(probabilities), predicted) >= limits
        return found

    def line(self) -> str:
        """Describe the choice in one sentence."""
        share = self.answered / self.examples
        values = sorted({f"{t:.4f}" for t in self.thresholds if math.isfinite(t)})
        return (
            f"Abstaining: confidence of at least {' to '.join(values[:: max(1, len(values) - 1)])} answers {share:.1%} of "
            f"{self.examples:,} held-out examples with {self.errors} errors; the error rate of answered examples is at most "
            f"{self.max_error:.2%} with {CONFIDENCE:.0%} confidence."
        )


def choose_thresholds(
    held_out: HeldOut, max_error: float, names: Sequence[str], *, per_class: bool = False
) -> Abstention:
    """Return a low threshold (per class: of each predicted class) whose error rate is at most `max_error` with 95% confidence.

    Raises a DataError with the reason if there is none.
    """
    every = np.full(len(held_out.predicted), True)
    groups = [held_out.predicted == k for k in range(len(names))] if per_class else [every]
    found = [_test_thresholds(held_out.confidence[some], held_out.correct[some], max_error) for some in groups]
    thresholds = tuple(found if per_class else found * len(names))
    answered = held_out.confidence >= np.asarray(thresholds)[held_out.predicted]
    if not answered.any():
        largest = max(groups, key=np.count_nonzero)
        raise _impossible(held_out.correct[largest][np.argsort(-held_out.confidence[largest])], max_error, per_class)
    errors = int((answered & ~held_out.correct).sum())
    return Abstention(max_error, thresholds, int(answered.sum()), errors, len(held_out.correct))


def coverage_curve(held_out: HeldOut) -> list[tuple[float, float]]:
    """Return (share of answered examples, their error rate) for every threshold, strictest first."""
    count, errors, _ = _by_threshold(held_out.confidence, held_out.correct)
    return [(k / len(held_out.correct), e / k) for k, e in zip(count.tolist(), errors.tolist(), strict=True)]


def _by_threshold(confidence: Any, correct: Any) -> tuple[Any, Any, Any]:
    """Return answered examples, errors and threshold of every distinct confidence, highest first."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, dtype=int)
    return last + 1, np.cumsum(~correct[order])[last], ordered[last]


def _test_thresholds(confidence: Any, correct: Any, max_error: float) -> float:
    """Return the last threshold before the first one that fails; infinity if the first one does.

    Thresholds become lower in steps that are fixed before any answer is looked at, so that the risk of all tests together is that
    of one test (fixed-sequence testing): the first one whose true error rate is above the limit passes in at most 5% of cases.
    """
    count, errors, thresholds = _by_threshold(confidence, correct)
    chosen = math.inf
    for place in np.searchsorted(count, _tested_counts(len(confidence), max_error)):
        if _chance_of(int(errors[place]), count[place], max_error) > 1 - CONFIDENCE:
            break
        chosen = float(thresholds[place])
    return chosen


def _tested_counts(examples: int, max_error: float) -> Array:
    """Return how many examples each tested threshold answers, strictest first; none if there are too few examples."""
    first = next(
        (n for e in FIRST_ERRORS if (n := _fewest_passing(e, max_error)) <= examples / 2), _fewest_passing(0, max_error)
    )
    if first > examples:
        return np.zeros(0, dtype=np.int64)
    return np.linspace(max(first, FIRST_SHARE * examples), examples, STEPS + 1).round().astype(np.int64)


def _fewest_passing(errors: int, max_error: float) -> int:
    """Return the number of examples that pass the test with this many errors."""
    low, high = errors, math.ceil((errors + 1) * math.log(1 - CONFIDENCE) / math.log1p(-max_error))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _chance_of(errors, middle, max_error) <= 1 - CONFIDENCE else (middle, high)
    return high


def _chance_of(errors: int, count: int, rate: float) -> float:
    """Return the probability of at most this many errors in `count` examples; the runtime has no scipy."""
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(e + 1)
        - math.lgamma(count - e + 1)
        + e * math.log(rate)
        + (count - e) * math.log1p(-rate)
        for e in range(errors + 1)
    ]
    return math.fsum(map(math.exp, logs))


def _impossible(correct: Any, max_error: float, per_class: bool) -> DataError:
    """`correct` are the held-out examples, or those of the most frequent class, the most confident first."""
    needed, examples, kind = _fewest_passing(0, max_error), len(correct), " of one class" if per_class else ""
    if examples < needed:
        reason = f"at least {needed:,} held-out examples{kind} are needed, and there are {examples:,}"
    else:
        count = int(_tested_counts(examples, max_error)[0])
        wrong = int((~correct[:count]).sum())
        reason = f"{wrong:,} of the {count:,} most confident held-out examples{kind} are wrong ({wrong / count:.2%})"
    problem = (
        f"no threshold keeps the error rate at {max_error:.2%} or below with {CONFIDENCE:.0%} confidence: {reason}"
    )
    return DataError(
        problem, fix="Allow a larger --max_error, or set --calibration_file to a file with more labeled examples."
    )
