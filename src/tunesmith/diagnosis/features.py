"""The numbers that signs, sentences and advice compare with; what a verdict rests on is fitted (`weighing.py`).

Losses are shares of the loss of the best constant on the same rows, so that the numbers hold for 2 classes, for 50 and for a
regression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.evidence import RowEvidence, decode_rows
from tunesmith.metrics.table import greater_is_better
from tunesmith.runs.curves import Curves, Floats

MIN_EVALUATIONS = 3
"""Of curves without rows: two points are a line, and every line "rises" or "falls"."""
MIN_ROWS = 20
"""Below this many validation rows one standard error of an accuracy is more than 10 points."""

ENOUGH_ROWS = 150
"""Enough validation examples to tell half of what was learned from nothing: two errors of an accuracy are 8 points."""

ABOVE_CONSTANT = 2.0
"""Standard errors of the paired difference by which the score must be above the best constant: a run at chance passes with
a probability of 2.3%, whatever the number of evaluations, because the last one alone is asked."""
ERROR_RATE = 0.01
"""Of a rise, over all evaluations of a run: the required z grows with their number."""

SIGNAL = 1.6
"""Times the z that is significant at 1% over all comparisons: beyond it something was better than the constant."""
ROUGH_GAIN = 0.03
"""By what share a loss is below the constant's, where rows were not kept, to count as a signal."""
LOSS_SPREAD = 1.0
"""Standard deviation of one row's loss, as a multiple of the mean loss, where rows were not kept."""
PAIRED = 0.7
"""Without rows: two evaluations of the same rows differ with about 0.7 of the error of unpaired ones."""

LOW_RATE, USUAL_RATE, HIGH_RATE = 5e-6, 5e-5, 5e-4
"""Peak learning rates for fine-tuning all layers with AdamW at a batch of 16; at batch b times the square root of 16 / b."""
USUAL_HEAD_RATE = 1e-3
"""For a head on a frozen encoder."""
LITTLE_WORK = 8e-4
"""The sum of the learning rates of all steps. Runs that had only begun had 7e-5 to 6e-4, those that learnt 2e-3 and more."""
ENOUGH_WORK = 8e-3
"""The sum of the learning rates that a longer run is advised to reach: ten times that of runs that had only begun."""
MOST_TIMES = 10
"""A run is not advised to train longer than this many times at once."""
USUAL_BATCH = 16
"""The effective batch that rates are compared at."""

NOTABLE_RISE, LARGE_RISE = 0.2, 0.4
"""By what share a validation loss is above the lowest one: from the first on it is mentioned, from the second on it is called
overfitting, and kept weights with such a loss are no longer a note."""
FAR_RISE = 0.7
"""From here on a rise comes first, also of a run that keeps its best weights: then as a note."""
LATE_FALL = 0.3
"""Share of the gain that came in the second half of a run that is not over: the next steps bring more."""
SURE_AND_WRONG = 0.74
"""How often the quarter of validation rows that the model is surest of is right. With 40% wrong labels it was 0.44 to 0.64."""
TRAIN_ABOVE = 2.5
"""Standard errors by which training rows cost more than validation rows: their labels are worse. In good runs they cost less."""
RANDOM_SHARE = 0.3
"""Labels of a regression without a meaning: 0.6 at 40% wrong labels."""
LEAST_CHANGE = 0.05
"""A rise or a swing of less than this share of the constant's loss is none, however large a share of a small loss it is."""
SWING = 0.2
"""A validation loss that rose by this share and came back."""
CLOSE = 0.15
"""A verdict with at least this probability is named in addition to the first."""
SURE = 0.6
"""A verdict with at least this probability is given even where the validation rows are few."""


@dataclass(frozen=True, slots=True)
class Change:
    """A paired difference over the same rows: its mean, its standard error, and the mean before it."""

    size: float
    error: float
    before: float = 0.0

    @property
    def z(self) -> float:
        """The difference in standard errors; 0 where rows do not differ at all."""
        if self.error > 0:
            return self.size / self.error
        return 0.0 if self.size == 0 or not math.isfinite(self.size) else math.copysign(99.0, self.size)


def change_between(before: Floats, after: Floats) -> Change:
    """The mean of `after - before` with its exact standard error; examples where one is NaN or infinite do not count."""
    gap = after - before
    good = np.isfinite(gap)
    gap = gap[good]
    if len(gap) < 2:
        return Change(math.nan, math.nan)
    return Change(float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap))), float(before[good].mean()))


def needed_z(comparisons: int, error_rate: float = 0.01) -> float:
    """The z that one of this many comparisons exceeds by chance with this probability in all (Bonferroni, one-sided)."""
    return -NormalDist().inv_cdf(error_rate / max(1, comparisons))


@dataclass(frozen=True, slots=True, eq=False)
class RowSigns:
    """The evaluations of a run with rows, in step order. Losses are plain ones: no smoothing, no class weights."""

    steps: tuple[int, ...]
    validation: tuple[RowEvidence, ...]
    train: tuple[RowEvidence | None, ...]

    @property
    def task(self) -> Task:
        """The task of the rows."""
        return self.validation[-1].task

    @property
    def losses(self) -> Floats:
        """Mean validation loss by evaluation; infinite where the loss of an example is NaN or infinite."""
        return np.array([finite_mean(rows.loss) for rows in self.validation])

    @property
    def scores(self) -> Floats:
        """Accuracy, micro F1 or Pearson's r by evaluation."""
        return np.array([rows.score_parts()[0] for rows in self.validation])

    @property
    def best(self) -> int:
        """The evaluation with the lowest validation loss."""
        return int(np.argmin(self.losses))

    @property
    def constant_loss(self) -> float:
        """What the best constant costs on the validation rows."""
        return finite_mean(self.validation[-1].constant_loss)

    @property
    def constant_score(self) -> float:
        """What the best constant scores on the validation rows."""
        return self.validation[-1].constant_parts()[0]

    def gain(self, at: int = -1) -> Change:
        """By how much the loss is below that of the constant."""
        rows = self.validation[at]
        return change_between(rows.loss, rows.constant_loss)

    def score_gain(self, at: int = -1) -> Change:
        """By how much the score is above that of the constant."""
        return gain_of_score(self.validation[at])

    def rise(self) -> Change:
        """From the lowest validation loss to the last."""
        return change_between(self.validation[self.best].loss, self.validation[-1].loss)

    def score_change(self) -> Change:
        """From the best score to the last one."""
        best = int(np.argmax(np.nan_to_num(self.scores, nan=-1.0)))
        before, after = (self.validation[k].score_parts()[1] for k in (best, -1))
        return change_between(before, after)


def finite_mean(values: Floats) -> float:
    return float(values.mean()) if len(values) and np.isfinite(values).all() else math.inf


def gain_of_score(rows: RowEvidence) -> Change:
    """Pearson's r of answers that do not differ is 0 with the error of unrelated rows."""
    (own, parts), (_, constant) = rows.score_parts(), rows.constant_parts()
    change = change_between(constant, parts)
    if rows.task is Task.REGRESSION:
        return Change(own, max(change.error, (1 - own**2) / math.sqrt(max(2, len(rows) - 1))))
    return change


def _read_rows(curves: Curves, steps: list[int]) -> RowSigns | None:
    """Validation examples at these evaluations, and training examples where there are some; None unless each step has them."""
    texts, samples = (curves.row_texts.get(split, {}) for split in ("validation", "train_sample"))
    if not steps or not set(steps) <= set(texts):
        return None
    decoded = [(_decoded(texts[step]), _decoded(samples.get(step))) for step in sorted(steps)]
    validation = [rows for rows, _ in decoded if rows is not None]
    first = validation[0] if len(validation) == len(steps) else None
    if first is None or any(len(rows) != len(first) or rows.task is not first.task for rows in validation):
        return None
    return RowSigns(tuple(sorted(steps)), tuple(validation), tuple(sample for _, sample in decoded))


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
    """How often the rows with the highest confidence are right; NaN where there is none."""
    if not np.isfinite(rows.confidence).all():
        return math.nan
    surest = np.argsort(-np.abs(rows.confidence), kind="stable")[: max(10, round(share * len(rows)))]
    return float(rows.hits[surest].mean())


def plateau(rows: RowEvidence) -> float:
    """The share of wrong rows among the surest, divided by that of all rows: near 1 where confidence says nothing about being
    right, as with labels replaced at random; near 0 where a task is hard for some rows and easy for others."""
    wrong = float(1 - rows.hits.mean())
    return (1 - sure_accuracy(rows)) / wrong if wrong > 0 else 0.0


def overconfidence(rows: RowEvidence) -> float:
    """Mean confidence minus how often it is right: positive when the model is surer than that; NaN without a confidence."""
    return float(np.abs(rows.confidence).mean() - rows.hits.mean())


def describe_answers(rows: RowEvidence) -> dict[str, float]:
    """Signs of one set of rows. `top`: the confidence that one row in ten exceeds, low with labels replaced at random; `gain`:
    the score above the constant's, as a share of what a perfect one would have."""
    confidence = np.abs(rows.confidence)
    return {
        "loss": loss_share(rows),
        "gain": gain_of_score(rows).size / max(0.05, 1 - rows.constant_parts()[0]),
        "sure": sure_accuracy(rows),
        "plateau": plateau(rows),
        "over": overconfidence(rows),
        "top": float(np.quantile(confidence, 0.9)) if np.isfinite(confidence).all() else math.nan,
    }


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


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One entry per evaluation with a finite validation loss, in step order. A score is NaN where there is none."""

    curves: Curves
    config: Mapping[str, Any]
    step: NDArray[np.int64]
    epoch: Floats
    val_loss: Floats
    train_loss: Floats
    metric: str | None
    val_score: Floats
    train_score: Floats
    rows_evaluated: int
    chance_loss: float
    """Loss of knowing only the class shares."""
    chance_accuracy: float | None
    """Accuracy of always giving the most frequent class; None when unknown or when the score is another one."""
    running: bool = False
    """Whether the run is still running."""
    rows: RowSigns | None = None
    """Each row's loss and prediction at these evaluations, where the run kept them."""
    chance_known: bool = True
    """Whether `chance_loss` is that of the best constant; else the first steps stand for it."""
    train_chance_loss: float = math.nan
    """The constant's loss on training rows."""
    regression: bool = False
    label_names: tuple[str, ...] = ()
    floors: tuple[tuple[str, float], ...] = ()
    """Scores of simpler models on the validation rows, by the metric of this reading."""
    probe_rows: RowEvidence | None = None
    """Training rows, and what a linear model of the frozen features that has not seen them says of them."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def best(self) -> int:
        """Index of the lowest validation loss."""
        return int(np.argmin(self.val_loss))

    @property
    def kept(self) -> int | None:
        """Index of the evaluation whose weights the run keeps; None when it keeps the last weights, whatever their score."""
        best = self.curves.best() if self.curves.tracked_metric else None
        if best is None or self.option("load_best_model_at_end", True) is False:
            return None
        return next((at for at, step in enumerate(self.step) if step == best[1]), None)

    def loss_noise(self, loss: float) -> float:
        """One standard error of the difference of two validation losses about this high."""
        return PAIRED * LOSS_SPREAD * loss * math.sqrt(2 / max(1, self.rows_evaluated))

    def score_noise(self, score: float) -> float:
        """One standard error of the difference of two validation scores about this high."""
        inside = min(max(score, 0.02), 0.98)
        return PAIRED * math.sqrt(2 * inside * (1 - inside) / max(1, self.rows_evaluated))

    @property
    def chance_score(self) -> tuple[float, float] | None:
        """The score of the best constant and its error on this many examples; None when it is not known."""
        error = math.sqrt(1 / max(1, self.rows_evaluated))
        if self.chance_accuracy is not None:
            return self.chance_accuracy, math.sqrt(self.chance_accuracy * (1 - self.chance_accuracy)) * error
        if self.metric in ("pearson", "spearmanr", "matthews_correlation", "r2"):
            return 0.0, error
        return (0.5, error / 2) if self.metric == "auroc" else None

    def label_name(self, number: int) -> str:
        """The name of a class, or its id where names are not known."""
        return self.label_names[number] if number < len(self.label_names) else f"class {number}"

    # What the run was asked to do.

    def option(self, name: str, default: Any) -> Any:
        """A value of the config; the default when it is absent or None."""
        value = self.config.get(name)
        return default if value is None else value

    @property
    def rate(self) -> float:
        """The peak learning rate: as configured, else the highest in the journal."""
        seen = self.curves.learning_rate.finite().value
        return float(self.option("learning_rate", float(seen.max()) if len(seen) else 5e-5))

    @property
    def effective_batch(self) -> int:
        """Examples per optimizer step on one device."""
        size = int(self.option("per_device_train_batch_size", 8))
        return size * int(self.option("gradient_accumulation_steps", 1))

    @property
    def frozen(self) -> bool:
        """Whether the encoder was not trained."""
        return any(str(part) in ("encoder", "base_model") for part in self.option("freeze", ()))

    def rate_is(self, kind: str) -> bool:
        """Whether the rate is "low", "usual" or "high" for training the whole encoder."""
        found = "low" if self.rate <= LOW_RATE else "high" if self.rate >= HIGH_RATE else "usual"
        return found == kind


def read_curves(
    curves: Curves,
    config: Mapping[str, Any],
    *,
    label_counts: Mapping[str, int] | None = None,
    num_labels: int | None = None,
    label_names: Sequence[str] = (),
    floor: float | None = None,
    floors: Mapping[str, Mapping[str, float]] | None = None,
    probe_rows: str | None = None,
    running: bool = False,
) -> Reading:
    """A pure function of its arguments. `floor` is the loss of the best constant on the validation rows, `floors` are the scores
    of simpler models there (name -> metric -> score), `probe_rows` is row evidence of the probe as text."""
    loss = curves.metric("validation", "loss").finite()
    metric = "accuracy" if "accuracy" in curves.metric_names else curves.main_metric()
    shares = _shares(label_counts)
    rows = _read_rows(curves, loss.step.tolist())
    chance, known = _chance_loss(curves, shares, num_labels, floor)
    train_chance = chance
    if rows is not None:
        constant = rows.validation[-1].constant
        chance, known = rows.constant_loss, True
        samples = [float(part.constant_loss.mean()) for part in rows.train if part is not None]
        train_chance = (
            constant.entropy if constant.task is not Task.REGRESSION else float(np.mean([chance, *samples[:1]]))
        )
    return Reading(
        curves=curves,
        config=config,
        step=loss.step,
        epoch=loss.epoch,
        val_loss=loss.value,
        train_loss=_train_loss_at(curves, loss.step),
        metric=metric,
        val_score=_scores_at(curves, "validation", metric, loss.step),
        train_score=_scores_at(curves, "train_sample", metric, loss.step),
        rows_evaluated=curves.rows.get("validation", 0),
        chance_loss=chance,
        chance_accuracy=float(shares.max()) if shares is not None and metric == "accuracy" else None,
        running=running,
        label_names=tuple(label_names),
        floors=tuple((name, scores[metric]) for name, scores in (floors or {}).items() if metric and metric in scores),
        probe_rows=_decoded(probe_rows),
        rows=rows,
        chance_known=known,
        train_chance_loss=train_chance,
        regression=bool({"pearson", "spearmanr", "r2", "mse", "mae", "rmse"} & set(curves.metric_names)),
    )


def _decoded(text: str | None) -> RowEvidence | None:
    try:
        return decode_rows(text) if isinstance(text, str) else None
    except DataError:
        return None


def _shares(label_counts: Mapping[str, int] | None) -> Floats | None:
    counts = np.array([c for c in (label_counts or {}).values() if c > 0], dtype=np.float64)
    return counts / counts.sum() if len(counts) >= 2 else None


def _chance_loss(
    curves: Curves, shares: Floats | None, num_labels: int | None, floor: float | None
) -> tuple[float, bool]:
    """(loss of the best constant, whether it is that)."""
    if floor is not None:
        return floor, True
    if shares is not None:
        return float(-(shares * np.log(shares)).sum()), True
    if num_labels is not None and num_labels >= 2:
        return math.log(num_labels), True
    r2, mse = (curves.metric("validation", name).finite().value for name in ("r2", "mse"))
    if len(r2) and len(mse) and r2[-1] < 1:
        return float(mse[-1] / (1 - r2[-1])), True
    # A journal alone: a fresh head knows nothing, so the first steps show about what chance is.
    first = curves.train_loss.finite().value[: max(5, len(curves.train_loss) // 50)]
    return (float(np.median(first)) if len(first) else math.log(2)), False


def _train_loss_at(curves: Curves, steps: NDArray[np.int64]) -> Floats:
    """Loss of the training sample where it was evaluated, else the mean of the steps since half an interval before."""
    sample = curves.metric("train_sample", "loss").finite()
    raw = curves.train_loss.finite()
    found, before = [], 0
    for step in steps:
        hit = np.flatnonzero(sample.step == step)
        window = raw.value[(raw.step > (before + step) / 2) & (raw.step <= step)]
        mean = float(window.mean()) if len(window) else math.nan
        found.append(float(sample.value[hit[0]]) if len(hit) else mean)
        before = int(step)
    return np.array(found, dtype=np.float64)


def _scores_at(curves: Curves, split: str, metric: str | None, steps: NDArray[np.int64]) -> Floats:
    found = np.full(len(steps), np.nan)
    if metric is not None:
        series = curves.metric(split, metric)
        known = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
        sign = 1.0 if greater_is_better(metric) else -1.0  # a score: larger is better
        found = np.array([sign * known.get(int(s), math.nan) for s in steps], dtype=np.float64)
    return found


def fresh_loss(reading: Reading) -> tuple[float, float]:
    """(loss, error) of steps in the second half of the first epoch: each of their rows is seen for the first time.

    Unknown where the head started from a linear model, which was fitted to all training rows.
    """
    if reading.option("head_start", "off") == "on":
        return math.nan, math.nan
    raw = reading.curves.train_loss.finite()
    inside = raw.value[(raw.epoch > 0.5) & (raw.epoch <= 1.0)] / reading.train_chance_loss
    if len(inside) < 3:
        return math.nan, math.nan
    return float(inside.mean()), float(inside.std(ddof=1) / math.sqrt(len(inside)))


def error_of_mean(reading: Reading, at: int) -> float:
    """One standard error of a validation loss by itself, as a share of the constant's loss."""
    if reading.rows is None:
        return reading.loss_noise(float(reading.val_loss[at])) / reading.chance_loss
    loss = reading.rows.validation[at].loss
    return float(loss.std(ddof=1) / math.sqrt(max(1, len(loss)))) / reading.chance_loss if len(loss) > 1 else math.inf


def late_fall(reading: Reading, val: Floats) -> tuple[float, float, float]:
    """(share of the whole gain, z, size) of the fall between the middle and the end of the training, measured in summed rates.

    A schedule that lowers the rate flattens every curve over the steps; over the sum of the rates it does not.
    """
    rates = reading.curves.learning_rate.finite()
    if len(val) < 2 or not len(rates):
        return math.nan, math.nan, math.nan
    done = np.interp(reading.step, rates.step, np.cumsum(rates.value)) / max(float(rates.value.sum()), 1e-12)
    middle = int(np.argmin(np.abs(done[:-1] - 0.5)))
    fall, whole = float(val[middle] - val[-1]), float(max(1.0, val[0]) - val[-1])
    share = fall / whole if whole > 0 else 0.0
    if reading.rows is not None:
        change = change_between(reading.rows.validation[-1].loss, reading.rows.validation[middle].loss)
        return share, change.z if math.isfinite(change.z) else 0.0, fall
    return share, fall / (reading.loss_noise(float(reading.val_loss[-1])) / reading.chance_loss or 1e-9), fall


def step_noise(reading: Reading) -> float:
    """Spread of steps around the smoothed curve in the second half, relative to chance. Robust: a few spikes do not make it.

    The first half is left out: a regression begins far from the mean, and its descent is not noise.
    """
    raw = reading.curves.train_loss.finite()
    if len(raw) < 30:
        return 0.0
    rest = np.abs(raw.value - raw.smoothed().value)[len(raw) // 2 :]
    return float(1.2533 * rest.mean() / reading.chance_loss) if reading.chance_loss > 0 else 0.0


def batch_noise(reading: Reading, batch: int) -> float:
    """The spread of the best constant's loss between batches, relative to chance; 0 where rows were not kept."""
    if reading.rows is None:
        return 0.0
    loss = reading.rows.validation[-1].constant_loss
    return float(loss.std()) / math.sqrt(max(1, batch)) / max(float(loss.mean()), 1e-9)


def count_swings(reading: Reading) -> int:
    """Rises of the validation loss that were later undone: larger than a fifth, and than their noise at this many evaluations."""
    turns, found = _turning_points(reading.val_loss), 0
    needed = needed_z(len(reading), ERROR_RATE)
    for before, peak, after in zip(turns, turns[1:], turns[2:], strict=False):
        size = min(reading.val_loss[peak] - reading.val_loss[before], reading.val_loss[peak] - reading.val_loss[after])
        base = max(float(reading.val_loss[before]), float(reading.val_loss[after]))
        least = max(SWING * base, LEAST_CHANGE * reading.chance_loss)
        if size >= least and size > needed * _error_between(reading, before, peak):
            found += 1
    return found


def _error_between(reading: Reading, one: int, other: int) -> float:
    if reading.rows is None:
        return 1.25 * reading.loss_noise(float(reading.val_loss[other]))
    error = change_between(reading.rows.validation[one].loss, reading.rows.validation[other].loss).error
    return error if math.isfinite(error) else math.inf


def _turning_points(value: Floats) -> list[int]:
    kept = [0] if len(value) else []
    for k, ((a, b), (_, c)) in enumerate(pairwise(pairwise(value)), start=1):
        if (b - a) * (c - b) < 0:
            kept.append(k)
    return [*kept, len(value) - 1] if len(value) > 1 else kept


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


@dataclass(frozen=True, slots=True)
class Features:
    """Losses are shares of the best constant's loss; NaN is what is not known. `z` values are in standard errors."""

    first: float
    """Validation loss at the end of the first epoch."""
    lowest: float
    last: float
    train: float
    """Loss of the training sample at the end."""
    fresh: float
    """Loss of training rows that were not yet trained on: the steps of the second half of the first epoch."""
    gap_z: float
    """`first - fresh` in standard errors of both."""
    gain_z: float
    """By how much the last loss is below the constant's."""
    score_z: float
    """By how much the last score is above the constant's."""
    signal: float
    """By how much the loss or the score of any evaluation, or the score of a simpler model, is better than the constant's: in
    units of the z that their number asks for, so that 1 is significant at 1%."""
    train_z: float
    rise: float
    """Since the lowest validation loss, as a share of it."""
    rise_z: float
    """In units of the z that the number of evaluations asks for: 1 is significant at 1%."""
    score_fall_z: float
    late_fall: float
    """Share of all that was gained which came in the second half of the training, by the sum of the learning rates."""
    late_z: float
    late_size: float
    """The same fall as a share of the constant's loss."""
    swings: int
    step_noise: float
    batch_noise: float
    """What `step_noise` would be of the best constant: batches of a task with a rare class scatter by themselves."""
    spread: float
    sure: float
    """How often the surest quarter of the validation rows is right."""
    plateau: float
    train_above_z: float
    """By how much the loss of the training sample is above that of the validation rows."""
    classes: float
    random: float
    """The share of a regression's labels that have nothing to do with their texts, and twice the log likelihood ratio of that."""
    random_ratio: float
    calibration: float
    ignored: float
    """Share of the validation rows whose class is never predicted."""
    turned: float
    """How surely the answers mean other labels than the validation rows have; 1 is significant at 1%."""
    ignored_most: float
    """The same of the largest of these classes alone."""
    majority: float
    work: float
    """The sum of the learning rates of all steps."""
    rate: float
    """Peak rate, as it would be at a batch of 16."""
    frozen: bool
    train_rows: float
    keeps: bool
    """Whether the run keeps the weights of its best evaluation."""
    kept_rise: float
    """By what share the loss of the kept weights is above the lowest one."""
    kept_loss: float
    head_start: bool
    others: Mapping[str, float] = field(default_factory=dict)
    """Signs of single steps and of other rows, by name: the lowest evaluation, training rows, and the probe's answers."""

    @property
    def above(self) -> float:
        """By how many errors the score is above the constant's; the loss of a value must be below it, too."""
        if math.isnan(self.score_z) or (math.isnan(self.majority) and self.gain_z <= 0):
            return self.gain_z
        return self.score_z

    def named(self) -> dict[str, float]:
        """Every sign by its name."""
        plain = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "others"}
        return {name: float(value) for name, value in plain.items()} | dict(self.others)


def read_features(reading: Reading) -> Features:
    """All signs of a run with at least one evaluation."""
    rows = reading.rows
    val, train = reading.val_loss / reading.chance_loss, reading.train_loss / reading.chance_loss
    if rows is not None:
        val = np.asarray(rows.losses / rows.constant_loss)
        own = np.array([math.nan if part is None else loss_share(part) for part in rows.train])
        train = np.where(np.isfinite(own), own, train) if len(own) == len(train) else own
    first = int(np.argmin(np.abs(reading.epoch - 1.0)))
    fall, late_z, late_size = late_fall(reading, val)
    fresh, fresh_error = fresh_loss(reading)
    batch = reading.effective_batch
    at = len(reading) - 1 if reading.kept is None else reading.kept
    numbers = _from_rows(rows, reading) if rows is not None else _from_curves(reading)
    rates, lowest = reading.curves.learning_rate.finite().value, float(reading.val_loss.min())
    return Features(
        first=float(val[first]),
        lowest=float(val.min()),
        last=float(val[-1]),
        train=float(train[-1]),
        fresh=fresh,
        gap_z=(float(val[first]) - fresh) / math.hypot(fresh_error, error_of_mean(reading, first)),
        late_fall=fall,
        late_z=late_z,
        late_size=late_size,
        swings=count_swings(reading),
        step_noise=step_noise(reading),
        batch_noise=batch_noise(reading, batch),
        work=float(rates.sum()) if len(rates) else reading.rate * float(reading.step[-1]) / 2,
        rate=reading.rate * math.sqrt(USUAL_BATCH / max(1, batch)),
        frozen=reading.frozen,
        train_rows=reading.curves.train_rows or math.nan,
        classes=math.nan if rows is None else len(rows.validation[-1].constant.values),
        keeps=reading.kept is not None,
        kept_rise=float(reading.val_loss[at] - lowest) / max(lowest, 1e-9),
        kept_loss=float(reading.val_loss[at] / reading.chance_loss),
        head_start=reading.option("head_start", "off") == "on",
        others=_of_steps(reading) | _of_other_rows(reading, at),
        **numbers,
    )


def _of_steps(reading: Reading) -> dict[str, float]:
    """The loss of the first and the last fifth of all steps and the largest one, as shares of the constant's."""
    value = reading.curves.train_loss.finite().value / reading.train_chance_loss
    if len(value) < 4:
        return {}
    part = max(1, len(value) // 5)
    return {
        "steps_first": float(value[:part].mean()),
        "steps_last": float(value[-part:].mean()),
        "steps_highest": float(value.max()),
    }


def _of_other_rows(reading: Reading, kept: int) -> dict[str, float]:
    """What the answers at the lowest validation loss, those for training rows and those of the probe show."""
    rows = reading.rows
    found: dict[str, float] = {}
    if rows is not None:
        parts = {"last": -1, "lowest": rows.best, "kept": kept}
        known = {name: describe_answers(rows.validation[at]) for name, at in parts.items()}
        train = {name: describe_answers(part) for name, at in parts.items() if (part := rows.train[at]) is not None}
        for name in ("lowest", "kept") if train else ():
            found |= {f"{name}_{k}_gap": known[name][k] - train[name][k] for k in ("loss", "gain")}
        found |= {f"lowest_{k}": value for k, value in known["lowest"].items()}
        found |= {f"train_{name}_{k}": v for name in ("last", "lowest") for k, v in train.get(name, {}).items()}
        found["score_rise"] = float(np.nanmax(rows.scores) - rows.scores[0])
        found["kept_rise_z"] = change_between(rows.validation[rows.best].loss, rows.validation[kept].loss).z
    probe = reading.probe_rows
    if probe is not None:
        found |= {f"probe_{k}": value for k, value in describe_answers(probe).items()}
        found |= {
            "probe_z": gain_of_score(probe).z,
            "probe_turned": turned(probe),
            "probe_random": random_share(probe)[0],
        }
        if rows is not None:
            found["probe_above"] = found["probe_gain"] - known["kept"]["gain"]
    return found


def _from_rows(rows: RowSigns, reading: Reading) -> dict[str, float]:
    rise, count = rows.rise(), len(rows.steps)
    needed = needed_z(count - 1, ERROR_RATE)
    sample, last = rows.train[-1], rows.validation[-1]
    values, ignored = last.constant.values, [rows for _, rows in ignored_classes(last)]
    gains = [change.z for k in range(count) for change in (rows.gain(k), rows.score_gain(k))]
    share, ratio = random_share(last)
    return {
        "gain_z": rows.gain().z,
        "score_z": rows.score_gain().z,
        "signal": max([*gains, *_floor_z(reading)]) / needed_z(len(gains), ERROR_RATE),
        "train_z": math.nan if sample is None else gain_of_score(sample).z,
        "rise": rise.size / max(rise.before, 1e-9),
        "rise_z": rise.z / needed,
        "score_fall_z": -rows.score_change().z / needed,
        "spread": answer_spread(last),
        "sure": sure_accuracy(last),
        "plateau": plateau(last),
        "train_above_z": math.nan if sample is None else _above_z(sample, last),
        "random": share,
        "random_ratio": ratio,
        "calibration": overconfidence(last),
        "ignored": sum(ignored) / max(1, len(last)),
        "turned": turned(last),
        "ignored_most": max(ignored, default=0) / max(1, len(last)),
        "majority": math.nan
        if rows.task is Task.REGRESSION
        else max(values)
        if rows.task is not Task.MULTILABEL
        else 0.0,
    }


def _above_z(one: RowEvidence, other: RowEvidence) -> float:
    """By how many errors the first rows cost more than the others, both in shares of their constant's loss."""
    parts = [rows.loss / max(1e-9, float(rows.constant_loss.mean())) for rows in (one, other)]
    error = math.sqrt(sum(float(part.var(ddof=1)) / len(part) for part in parts)) if min(map(len, parts)) > 1 else 0.0
    return float(parts[0].mean() - parts[1].mean()) / error if error > 0 and math.isfinite(error) else math.nan


def _floor_z(reading: Reading) -> list[float]:
    """By how many errors simpler models are above the constant, where the error is known."""
    if reading.chance_score is None:
        return []
    value, error = reading.chance_score
    return [(floor - value) / max(error, 1e-9) for _, floor in reading.floors]


def _from_curves(reading: Reading) -> dict[str, float]:
    low, end = float(reading.val_loss.min()), float(reading.val_loss[-1])
    needed, noise = needed_z(len(reading) - 1, ERROR_RATE), reading.loss_noise(low) or 1e-9
    scores, chance = reading.val_score, reading.chance_score
    best = float(np.nanmax(scores)) if np.isfinite(scores).any() else math.nan
    fall = (best - float(scores[-1])) / (reading.score_noise(best) or 1e-9) if math.isfinite(best) else 0.0
    constant = reading.loss_noise(reading.chance_loss) or 1e-9

    def above(score: float) -> float:
        return math.nan if chance is None else (score - chance[0]) / max(chance[1], 1e-9)

    gains = [z for z in ((reading.chance_loss - low) / constant, above(best), *_floor_z(reading)) if math.isfinite(z)]
    unknown = ("spread", "sure", "plateau", "train_above_z", "random", "random_ratio", "calibration", "turned")
    return {
        "gain_z": (reading.chance_loss - end) / constant,
        "score_z": above(float(scores[-1])),
        "signal": max(
            max(gains) / needed_z(2 * len(reading), ERROR_RATE), (1 - low / reading.chance_loss) / ROUGH_GAIN
        ),
        "train_z": above(float(reading.train_score[-1])),
        "rise": (end - low) / max(low, 1e-9),
        "rise_z": (end - low) / noise / needed,
        "score_fall_z": fall / needed if math.isfinite(fall) else 0.0,
        **dict.fromkeys(unknown, math.nan),
        "ignored": 0.0,
        "ignored_most": 0.0,
        "majority": math.nan if reading.regression else (reading.chance_accuracy or 0.0),
    }
