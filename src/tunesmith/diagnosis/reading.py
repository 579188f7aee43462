"""A run as arrays: losses and scores of its evaluations, the examples behind them, and the constant baseline.

`read_curves` returns the input of the diagnosis. Differences between evaluations of the same examples are paired: their standard
errors are exact if the run stored its examples, and estimated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.calibration import LabelNoise
from tunesmith.metrics.evidence import RowEvidence, decode_rows
from tunesmith.metrics.table import greater_is_better
from tunesmith.runs.event_log import Curves, Floats

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
    baselines: tuple[tuple[str, float], ...] = ()
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


def read_curves(
    curves: Curves,
    config: Mapping[str, Any],
    *,
    label_counts: Mapping[str, int] | None = None,
    num_labels: int | None = None,
    label_names: Sequence[str] = (),
    constant_loss: float | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    probe_rows: str | None = None,
    label_noise: Any = None,
    running: bool = False,
) -> Reading:
    """Combine curves and facts about the data; a pure function of its arguments.

    `constant_loss` is the validation loss of the constant baseline, `baselines` are validation scores of others (name -> metric
    -> score), `probe_rows` and `label_noise` are entries of data_summary.json.
    """
    loss = curves.metric("validation", "loss").finite()
    metric = "accuracy" if "accuracy" in curves.metric_names else curves.main_metric()
    counts = np.array([c for c in (label_counts or {}).values() if c > 0], dtype=np.float64)
    shares = counts / counts.sum() if len(counts) >= 2 else None
    rows = _read_rows(curves, loss.step.tolist())
    chance, known = _chance_loss(curves, shares, num_labels, constant_loss)
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
        baselines=tuple(
            (name, scores[metric]) for name, scores in (baselines or {}).items() if metric and metric in scores
        ),
        probe_rows=_decoded(probe_rows),
        label_noise=LabelNoise.from_json(label_noise),
        rows=rows,
        chance_known=known,
        train_chance_loss=train_chance,
        regression=bool({"pearson", "spearmanr", "r2", "mse", "mae", "rmse"} & set(curves.metric_names)),
    )


def _chance_loss(
    curves: Curves, shares: Floats | None, num_labels: int | None, constant_loss: float | None
) -> tuple[float, bool]:
    """Return the loss of the constant baseline, and whether it is known."""
    if constant_loss is not None:
        return constant_loss, True
    if shares is not None:
        return float(-(shares * np.log(shares)).sum()), True
    if num_labels is not None and num_labels >= 2:
        return math.log(num_labels), True
    r2, mse = (curves.metric("validation", name).finite().value for name in ("r2", "mse"))
    if len(r2) and len(mse) and r2[-1] < 1:
        return float(mse[-1] / (1 - r2[-1])), True
    # Only an event log: a new head knows nothing, so the first steps have about the loss of the constant baseline.
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


# --- features ---------------------------------------------------------------------------------------------------------

# The features of a run that the verdict is computed from (`verdict.py`), with exact or estimated standard errors.
# Losses are shares of the loss of the constant baseline on the same examples, so that they mean the same for 2 classes,
# for 50 and for regression. bench/diagnose_fit.py shows how often verdicts are right with fewer features.

ERROR_RATE = 0.01
"""Error rate of tests over all evaluations of a run: the required z grows with their number."""
ROUGH_GAIN = 0.03
"""Without stored examples: share by which a loss is below that of the constant baseline to count as a signal."""
LEAST_CHANGE = 0.05
"""A rise or swing of less than this share of the constant baseline's loss does not count."""
SWING = 0.2
"""A validation loss that rose by this share and fell back is a swing."""
USUAL_BATCH = 16
"""Learning rates are compared at this batch size."""


@dataclass(frozen=True, slots=True)
class Features:
    """Losses are shares of the constant baseline's loss; unknown features are NaN; `z` are in standard errors."""

    first: float
    """Validation loss at the end of the first epoch."""
    lowest: float
    last: float
    train: float
    """Loss of the training sample at the end."""
    fresh: float
    """Training loss of examples seen for the first time: steps in the second half of the first epoch."""
    gap_z: float
    """`first - fresh` in standard errors of both."""
    gain_z: float
    """By how much the last loss is below that of the constant baseline."""
    score_z: float
    """By how much the last score is above that of the constant baseline."""
    signal: float
    """The best z of any loss, score or baseline above the constant baseline; 1 is significant at 1% over all of them."""
    train_z: float
    """By how much the score of the training sample is above that of the constant baseline."""
    rise: float
    """Rise of the validation loss since its lowest value, as a share of it."""
    rise_z: float
    """1 is significant at 1% over all evaluations."""
    score_fall_z: float
    late_fall: float
    """Share of the whole gain that came in the second half of the training, by summed learning rates."""
    late_z: float
    late_size: float
    swings: int
    step_noise: float
    batch_noise: float
    """`step_noise` of the constant baseline: batches of a task with a rare class always vary."""
    spread: float
    """How much predictions differ between examples of one label."""
    sure: float
    """Accuracy on the quarter of the validation examples with the highest confidence."""
    plateau: float
    train_above_z: float
    """By how much the loss of the training sample is above that of the validation examples."""
    classes: float
    ignored: float
    """Share of the validation examples whose class is never predicted."""
    turned: float
    """How surely predictions mean other labels than the validation examples have; 1 is significant at 1%."""
    majority: float
    work: float
    """The sum of the learning rates of all steps."""
    rate: float
    """Peak learning rate, as it would be at a batch size of 16."""
    frozen: bool
    train_rows: float
    keeps: bool
    """Whether the run keeps the weights of its best evaluation."""
    head_start: bool
    probe_z: float
    """By how much the score of the linear probe is above that of the constant baseline, on training examples."""
    probe_gain: float
    probe_sure: float
    probe_turned: float

    @property
    def above(self) -> float:
        """By how many standard errors the score, or else the loss, is better than that of the constant baseline."""
        if math.isnan(self.score_z) or (math.isnan(self.majority) and self.gain_z <= 0):
            return self.gain_z
        return self.score_z

    def named(self) -> dict[str, float]:
        """Return every feature by its name."""
        return {part.name: float(getattr(self, part.name)) for part in fields(self)}


def read_features(reading: Reading) -> Features:
    """Return the features of a run with at least one evaluation."""
    rows = reading.rows
    val, train = reading.val_loss / reading.chance_loss, reading.train_loss / reading.chance_loss
    if rows is not None:
        val = np.asarray(rows.losses / rows.constant_loss)
        pairs = [
            (math.nan, 1.0) if r is None else (finite_mean(r.loss), finite_mean(r.constant_loss)) for r in rows.train
        ]
        own = np.array([loss / max(1e-9, constant) for loss, constant in pairs])
        train = np.where(np.isfinite(own), own, train)
    first = int(np.argmin(np.abs(reading.epoch - 1.0)))
    fall, late_z, late_size = _late_fall(reading, val)
    fresh, fresh_error = _fresh_loss(reading)
    batch = reading.effective_batch
    rates = reading.curves.learning_rate.finite().value
    return Features(
        first=float(val[first]),
        lowest=float(val.min()),
        last=float(val[-1]),
        train=float(train[-1]),
        fresh=fresh,
        gap_z=(float(val[first]) - fresh) / math.hypot(fresh_error, _error_of_mean(reading, first)),
        late_fall=fall,
        late_z=late_z,
        late_size=late_size,
        swings=_count_swings(reading),
        step_noise=_step_noise(reading),
        batch_noise=_batch_noise(reading, batch),
        work=float(rates.sum()) if len(rates) else reading.rate * float(reading.step[-1]) / 2,
        rate=reading.rate * math.sqrt(USUAL_BATCH / max(1, batch)),
        frozen=reading.frozen,
        train_rows=reading.curves.train_rows or math.nan,
        classes=math.nan if rows is None else len(rows.validation[-1].constant.values),
        keeps=reading.kept is not None,
        head_start=reading.option("head_start", "off") == "on",
        **(_from_rows(rows, reading) if rows is not None else _from_curves(reading)),
        **_from_probe(reading.probe_rows),
    )


def _from_rows(rows: RowSeries, reading: Reading) -> dict[str, float]:
    """Return features that are exact if the examples of the evaluations are stored."""
    rise, count = rows.rise(), len(rows.steps)
    needed = needed_z(count - 1, ERROR_RATE)
    sample, last = rows.train[-1], rows.validation[-1]
    gains = [change.z for k in range(count) for change in (rows.gain(k), rows.score_gain(k))]
    majority = {Task.REGRESSION: math.nan, Task.MULTILABEL: 0.0}.get(rows.task, max(last.constant.values))
    return {
        "gain_z": rows.gain().z,
        "score_z": rows.score_gain().z,
        "signal": max([*gains, *_baseline_z(reading)]) / needed_z(len(gains), ERROR_RATE),
        "train_z": math.nan if sample is None else gain_of_score(sample).z,
        "rise": rise.size / max(rise.before, 1e-9),
        "rise_z": rise.z / needed,
        "score_fall_z": -rows.score_change().z / needed,
        "spread": _prediction_spread(last),
        "sure": sure_accuracy(last),
        "plateau": _plateau(last),
        "train_above_z": math.nan if sample is None else _above_z(sample, last),
        "ignored": sum(size for _, size in ignored_classes(last)) / max(1, len(last)),
        "turned": turned(last),
        "majority": majority,
    }


def _from_curves(reading: Reading) -> dict[str, float]:
    """Return the same features from the curves only."""
    low, end = float(reading.val_loss.min()), float(reading.val_loss[-1])
    needed, noise = needed_z(len(reading) - 1, ERROR_RATE), reading.loss_noise(low) or 1e-9
    scores, chance = reading.val_score, reading.chance_score
    best = float(np.nanmax(scores)) if np.isfinite(scores).any() else math.nan
    fall = (best - float(scores[-1])) / (reading.score_noise(best) or 1e-9) if math.isfinite(best) else 0.0
    constant = reading.loss_noise(reading.chance_loss) or 1e-9

    def above(score: float) -> float:
        return math.nan if chance is None else (score - chance[0]) / max(chance[1], 1e-9)

    gains = [
        z for z in ((reading.chance_loss - low) / constant, above(best), *_baseline_z(reading)) if math.isfinite(z)
    ]
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
        **dict.fromkeys(("spread", "sure", "plateau", "train_above_z", "turned"), math.nan),
        "ignored": 0.0,
        "majority": math.nan if reading.regression else (reading.chance_accuracy or 0.0),
    }


def _from_probe(probe: RowEvidence | None) -> dict[str, float]:
    names = ("probe_z", "probe_gain", "probe_sure", "probe_turned")
    if probe is None:
        return dict.fromkeys(names, math.nan)
    gain = gain_of_score(probe)
    share = gain.size / max(0.05, 1 - probe.constant_parts()[0])
    return dict(zip(names, (gain.z, share, sure_accuracy(probe), turned(probe)), strict=True))


def _baseline_z(reading: Reading) -> list[float]:
    """Return by how many standard errors other baselines are above the constant baseline."""
    if reading.chance_score is None:
        return []
    value, error = reading.chance_score
    return [(score - value) / max(error, 1e-9) for _, score in reading.baselines]


def _prediction_spread(rows: RowEvidence) -> float:
    if rows.task is Task.REGRESSION:
        scale = float(rows.labels.std()) or 1.0
        return float(rows.predictions.std()) / scale if np.isfinite(rows.predictions).all() else 0.0
    if not np.isfinite(rows.loss).all():
        return 0.0
    groups = np.unique(rows.labels, axis=0, return_inverse=True)[1].reshape(-1)
    inside = [rows.loss[groups == g] for g in range(int(groups.max()) + 1)]
    return float(np.sqrt(sum(((part - part.mean()) ** 2).sum() for part in inside) / len(rows)))


def sure_accuracy(rows: RowEvidence) -> float:
    """Return the accuracy on the quarter of the examples with the highest confidence; NaN without confidences."""
    if not np.isfinite(rows.confidence).all():
        return math.nan
    surest = np.argsort(-np.abs(rows.confidence), kind="stable")[: max(10, round(len(rows) / 4))]
    return float(rows.hits[surest].mean())


def _plateau(rows: RowEvidence) -> float:
    """Return the error rate of the most confident examples divided by that of all: near 1 if labels are random, near 0 if some
    examples are hard and others easy."""
    wrong = float(1 - rows.hits.mean())
    return (1 - sure_accuracy(rows)) / wrong if wrong > 0 else 0.0


def ignored_classes(rows: RowEvidence) -> list[tuple[int, int]]:
    """Return (class, number of examples) of classes with 5 or more examples that is predicted for at most one in 20 of them."""
    if rows.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    found = []
    for name in range(len(rows.constant.values)):
        own = rows.labels == name
        if own.sum() >= 5 and (rows.predictions[own] == name).mean() <= 0.05:
            found.append((name, int(own.sum())))
    return found


FEW = 0.1
"""A run with 5 predictions of a class with 89 examples had an MCC of 0.09, not significantly above 0."""


def only_class(rows: RowEvidence) -> int | None:
    """Return the class that is predicted for nearly every example: all others at most FEW times as often as they occur."""
    if rows.task not in (Task.BINARY, Task.MULTICLASS):
        return None
    name = int(np.bincount(rows.predictions).argmax())
    predicted, occur = ((found != name).sum() for found in (rows.predictions, rows.labels))
    return name if occur and predicted <= FEW * occur else None


def turned(rows: RowEvidence) -> float:
    """How surely the predictions mean other labels than the examples have: 1 is significant at 1% over all pairs of labels.

    Examples of a different label are predicted as "a" more often than those of label "a" (a test of two shares); predictions of a
    regression fall as the labels rise. Neither a hard task nor random labels do that.
    """
    if rows.task is Task.REGRESSION:
        return -rows.score_parts()[0] * math.sqrt(max(1, len(rows) - 1)) / needed_z(1, ERROR_RATE)
    width = len(rows.constant.values)
    many = rows.task is Task.MULTILABEL
    has = rows.labels.astype(bool) if many else rows.labels[:, None] == np.arange(width)
    predicted = rows.predictions.astype(bool) if many else rows.predictions[:, None] == np.arange(width)
    best = -math.inf
    for name in range(width):
        own = predicted[has[:, name], name]
        for other in range(width):
            others = predicted[has[:, other] & ~has[:, name], name]
            if other != name and min(len(own), len(others)) >= 5:
                best = max(best, _share_z(others, own))
    return best / needed_z(width * (width - 1), ERROR_RATE)


def _share_z(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Return by how many standard errors the first share is above the second."""
    both = float(np.concatenate([one, other]).mean())
    error = math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
    return float(one.mean() - other.mean()) / error if error > 0 else 0.0


def _above_z(one: RowEvidence, other: RowEvidence) -> float:
    """Return by how many standard errors the relative loss of `one` is above that of `other`."""
    parts = [rows.loss / max(1e-9, float(rows.constant_loss.mean())) for rows in (one, other)]
    error = math.sqrt(sum(float(part.var(ddof=1)) / len(part) for part in parts)) if min(map(len, parts)) > 1 else 0.0
    return float(parts[0].mean() - parts[1].mean()) / error if error > 0 and math.isfinite(error) else math.nan


def _fresh_loss(reading: Reading) -> tuple[float, float]:
    """Return the training loss, with its error, of examples that are seen for the first time.

    Unknown if the head was fitted to all training examples before the first step.
    """
    if reading.option("head_start", "off") == "on":
        return math.nan, math.nan
    raw = reading.curves.train_loss.finite()
    inside = raw.value[(raw.epoch > 0.5) & (raw.epoch <= 1.0)] / reading.train_chance_loss
    if len(inside) < 3:
        return math.nan, math.nan
    return float(inside.mean()), float(inside.std(ddof=1) / math.sqrt(len(inside)))


def _error_of_mean(reading: Reading, at: int) -> float:
    """Return one standard error of a validation loss, as a share of the constant baseline's loss."""
    if reading.rows is None:
        return reading.loss_noise(float(reading.val_loss[at])) / reading.chance_loss
    loss = reading.rows.validation[at].loss
    return float(loss.std(ddof=1) / math.sqrt(max(1, len(loss)))) / reading.chance_loss if len(loss) > 1 else math.inf


def _late_fall(reading: Reading, val: Floats) -> tuple[float, float, float]:
    """Return (share of the whole gain, z, size) of the fall between the middle and the end of the training.

    The middle is that of the summed learning rates: a schedule that lowers the rate flattens every curve over the steps.
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


def _step_noise(reading: Reading) -> float:
    """Return the spread of step losses around the smoothed curve in the second half, robust against a few spikes."""
    raw = reading.curves.train_loss.finite()
    if len(raw) < 30 or reading.chance_loss <= 0:
        return 0.0
    rest = np.abs(raw.value - raw.smoothed().value)[len(raw) // 2 :]
    return float(1.2533 * rest.mean() / reading.chance_loss)


def _batch_noise(reading: Reading, batch: int) -> float:
    if reading.rows is None:
        return 0.0
    loss = reading.rows.validation[-1].constant_loss
    return float(loss.std()) / math.sqrt(max(1, batch)) / max(float(loss.mean()), 1e-9)


def _count_swings(reading: Reading) -> int:
    """Count significant rises of the validation loss by at least a fifth that were undone later."""
    loss, found, needed = reading.val_loss, 0, needed_z(len(reading), ERROR_RATE)
    direction = np.sign(np.diff(loss))
    turns = [0, *(np.flatnonzero(direction[1:] * direction[:-1] < 0) + 1).tolist(), len(loss) - 1]
    for before, peak, after in zip(turns, turns[1:], turns[2:], strict=False):
        size = min(loss[peak] - loss[before], loss[peak] - loss[after])
        least = max(SWING * max(loss[before], loss[after]), LEAST_CHANGE * reading.chance_loss)
        if size >= least and size > needed * _error_between(reading, before, peak):
            found += 1
    return found


def _error_between(reading: Reading, one: int, other: int) -> float:
    if reading.rows is None:
        return 1.25 * reading.loss_noise(float(reading.val_loss[other]))
    error = change_between(reading.rows.validation[one].loss, reading.rows.validation[other].loss).error
    return error if math.isfinite(error) else math.inf
