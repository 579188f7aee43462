"""A run as arrays: losses and scores of its evaluations, the examples behind them, and the constant baseline.

`read_curves` returns the input of the diagnosis. Differences between evaluations of the same examples are paired: their standard
errors are exact if the run stored its examples, and estimated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.evidence import RowEvidence, decode_rows
from tunesmith.metrics.label_noise import LabelNoise
from tunesmith.metrics.table import greater_is_better
from tunesmith.runs.curves import Curves, Floats

LOW_RATE, USUAL_RATE, HIGH_RATE = 5e-6, 5e-5, 5e-4
"""Peak learning rates for fine-tuning all layers with AdamW at a batch size of 16."""
LOSS_SPREAD = 1.0
"""Without stored examples: standard deviation of an example's loss, as a multiple of the mean loss."""
PAIRED = 0.7
"""Without stored examples: the error of a paired difference is about 0.7 of that of an unpaired one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A paired difference over the same examples: its mean, its standard error, and the mean before it."""

    size: float
    error: float
    before: float = 0.0

    @property
    def z(self) -> float:
        """The difference in standard errors; 0 if no example differs."""
        if self.error > 0:
            return self.size / self.error
        return 0.0 if self.size == 0 or not math.isfinite(self.size) else math.copysign(99.0, self.size)


def change_between(before: Floats, after: Floats) -> Change:
    """Return the mean of `after - before` with its standard error; NaN and infinite examples are ignored."""
    gap = after - before
    good = np.isfinite(gap)
    gap = gap[good]
    if len(gap) < 2:
        return Change(math.nan, math.nan)
    return Change(float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap))), float(before[good].mean()))


def needed_z(comparisons: int, error_rate: float = 0.01) -> float:
    """Return the z that one of this many comparisons exceeds by chance with this probability (Bonferroni, one-sided)."""
    return -NormalDist().inv_cdf(error_rate / max(1, comparisons))


def finite_mean(values: Floats) -> float:
    """Return the mean; infinite if a value is NaN or infinite."""
    return float(values.mean()) if len(values) and np.isfinite(values).all() else math.inf


def gain_of_score(rows: RowEvidence) -> Change:
    """Return the score minus that of the constant baseline. Pearson's r of a constant is 0."""
    (own, parts), (_, constant) = rows.score_parts(), rows.constant_parts()
    change = change_between(constant, parts)
    if rows.task is Task.REGRESSION:
        return Change(own, max(change.error, (1 - own**2) / math.sqrt(max(2, len(rows) - 1))))
    return change


@dataclass(frozen=True, slots=True, eq=False)
class RowSeries:
    """The examples of every evaluation, in step order. Losses are plain ones: no smoothing, no class weights."""

    steps: tuple[int, ...]
    validation: tuple[RowEvidence, ...]
    train: tuple[RowEvidence | None, ...]

    @property
    def task(self) -> Task:
        """The task of the examples."""
        return self.validation[-1].task

    @property
    def losses(self) -> Floats:
        """Mean validation loss by evaluation; infinite if the loss of an example is NaN or infinite."""
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
        """The validation loss of the constant baseline."""
        return finite_mean(self.validation[-1].constant_loss)

    @property
    def constant_score(self) -> float:
        """The validation score of the constant baseline."""
        return self.validation[-1].constant_parts()[0]

    def gain(self, at: int = -1) -> Change:
        """Return by how much the loss is below that of the constant baseline."""
        rows = self.validation[at]
        return change_between(rows.loss, rows.constant_loss)

    def score_gain(self, at: int = -1) -> Change:
        """Return by how much the score is above that of the constant baseline."""
        return gain_of_score(self.validation[at])

    def rise(self) -> Change:
        """Return the change from the lowest validation loss to the last."""
        return change_between(self.validation[self.best].loss, self.validation[-1].loss)

    def score_change(self) -> Change:
        """Return the change from the best score to the last."""
        best = int(np.argmax(np.nan_to_num(self.scores, nan=-1.0)))
        before, after = (self.validation[k].score_parts()[1] for k in (best, -1))
        return change_between(before, after)


def _read_rows(curves: Curves, steps: list[int]) -> RowSeries | None:
    """Return the examples of these evaluations; None unless each of them stored its validation examples."""
    texts, samples = (curves.row_texts.get(split, {}) for split in ("validation", "train_sample"))
    if not steps or not set(steps) <= set(texts):
        return None
    decoded = [(_decoded(texts[step]), _decoded(samples.get(step))) for step in sorted(steps)]
    validation = [rows for rows, _ in decoded if rows is not None]
    first = validation[0] if len(validation) == len(steps) else None
    if first is None or any(len(rows) != len(first) or rows.task is not first.task for rows in validation):
        return None
    return RowSeries(tuple(sorted(steps)), tuple(validation), tuple(sample for _, sample in decoded))


def _decoded(text: str | None) -> RowEvidence | None:
    try:
        return decode_rows(text) if isinstance(text, str) else None
    except DataError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One entry per evaluation with a finite validation loss, in step order. Unknown scores are NaN."""

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
    """Loss of the constant baseline."""
    chance_accuracy: float | None
    """Share of the most frequent class; None if it is unknown or the metric is not accuracy."""
    running: bool = False
    rows: RowSeries | None = None
    """The examples of these evaluations, if the run stored them."""
    chance_known: bool = True
    """Whether `chance_loss` is that of the constant baseline; otherwise it is that of the first steps."""
    train_chance_loss: float = math.nan
    """Loss of the constant baseline on training examples."""
    regression: bool = False
    label_names: tuple[str, ...] = ()
    floors: tuple[tuple[str, float], ...] = ()
    """Validation scores of the other baselines, by `metric`."""
    probe_rows: RowEvidence | None = None
    """Training examples as predicted by a linear probe that has not seen them."""
    label_noise: LabelNoise | None = None
    """Estimated share of wrong training labels."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def best(self) -> int:
        """Index of the lowest validation loss."""
        return int(np.argmin(self.val_loss))

    @property
    def kept(self) -> int | None:
        """Index of the evaluation whose weights the run keeps; None if it keeps the last weights."""
        best = self.curves.best() if self.curves.tracked_metric else None
        if best is None or self.option("load_best_model_at_end", True) is False:
            return None
        return next((at for at, step in enumerate(self.step) if step == best[1]), None)

    def loss_noise(self, loss: float) -> float:
        """Return one standard error of the difference of two validation losses of about this size."""
        return PAIRED * LOSS_SPREAD * loss * math.sqrt(2 / max(1, self.rows_evaluated))

    def score_noise(self, score: float) -> float:
        """Return one standard error of the difference of two validation scores of about this size."""
        inside = min(max(score, 0.02), 0.98)
        return PAIRED * math.sqrt(2 * inside * (1 - inside) / max(1, self.rows_evaluated))

    @property
    def chance_score(self) -> tuple[float, float] | None:
        """The score of the constant baseline and its standard error; None if it is unknown."""
        error = math.sqrt(1 / max(1, self.rows_evaluated))
        if self.chance_accuracy is not None:
            return self.chance_accuracy, math.sqrt(self.chance_accuracy * (1 - self.chance_accuracy)) * error
        if self.metric in ("pearson", "spearmanr", "matthews_correlation", "r2"):
            return 0.0, error
        return (0.5, error / 2) if self.metric == "auroc" else None

    def label_name(self, number: int) -> str:
        """Return the name of a class, or its id if names are unknown."""
        return self.label_names[number] if number < len(self.label_names) else f"class {number}"

    def option(self, name: str, default: Any) -> Any:
        """Return a value of the config; the default if it is absent or None."""
        value = self.config.get(name)
        return default if value is None else value

    @property
    def rate(self) -> float:
        """The peak learning rate: as configured, else the highest in the event log."""
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
        """Whether the learning rate is "low", "usual" or "high" for training the whole encoder."""
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
    label_noise: Any = None,
    running: bool = False,
) -> Reading:
    """Combine curves and facts about the data; a pure function of its arguments.

    `floor` is the validation loss of the constant baseline, `floors` are the validation scores of other baselines (name -> metric
    -> score), `probe_rows` and `label_noise` are entries of data_summary.json.
    """
    loss = curves.metric("validation", "loss").finite()
    metric = "accuracy" if "accuracy" in curves.metric_names else curves.main_metric()
    counts = np.array([c for c in (label_counts or {}).values() if c > 0], dtype=np.float64)
    shares = counts / counts.sum() if len(counts) >= 2 else None
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
        label_noise=LabelNoise.from_json(label_noise),
        rows=rows,
        chance_known=known,
        train_chance_loss=train_chance,
        regression=bool({"pearson", "spearmanr", "r2", "mse", "mae", "rmse"} & set(curves.metric_names)),
    )


def _chance_loss(
    curves: Curves, shares: Floats | None, num_labels: int | None, floor: float | None
) -> tuple[float, bool]:
    """Return the loss of the constant baseline, and whether it is known."""
    if floor is not None:
        return floor, True
    if shares is not None:
        return float(-(shares * np.log(shares)).sum()), True
    if num_labels is not None and num_labels >= 2:
        return math.log(num_labels), True
    r2, mse = (curves.metric("validation", name).finite().value for name in ("r2", "mse"))
    if len(r2) and len(mse) and r2[-1] < 1:
        return float(mse[-1] / (1 - r2[-1])), True
    # An event log alone: a new head knows nothing, so the first steps have about the loss of the constant baseline.
    first = curves.train_loss.finite().value[: max(5, len(curves.train_loss) // 50)]
    return (float(np.median(first)) if len(first) else math.log(2)), False


def _train_loss_at(curves: Curves, steps: NDArray[np.int64]) -> Floats:
    """Return the loss of the training sample, or the mean of the steps since half an interval before the evaluation."""
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
    """Return the scores at these steps, negated for metrics of which smaller is better."""
    if metric is None:
        return np.full(len(steps), np.nan)
    series = curves.metric(split, metric)
    known = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
    sign = 1.0 if greater_is_better(metric) else -1.0
    return np.array([sign * known.get(int(s), math.nan) for s in steps], dtype=np.float64)
