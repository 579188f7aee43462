"""The features of a run that the verdict is computed from (`verdict.py`), with exact or estimated standard errors.

Losses are shares of the loss of the constant baseline on the same examples, so that they mean the same for 2 classes, for 50 and
for regression. bench/diagnose_fit.py shows how often verdicts are right with fewer features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tunesmith.diagnosis.reading import Reading, RowSeries, change_between, finite_mean, gain_of_score, needed_z
from tunesmith.labels import Task
from tunesmith.metrics.evidence import RowEvidence
from tunesmith.runs.curves import Floats

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
        own = np.array([math.nan if part is None else loss_share(part) for part in rows.train])
        train = np.where(np.isfinite(own), own, train) if len(own) == len(train) else own
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
    """Features that are exact if the examples of the evaluations are stored."""
    rise, count = rows.rise(), len(rows.steps)
    needed = needed_z(count - 1, ERROR_RATE)
    sample, last = rows.train[-1], rows.validation[-1]
    gains = [change.z for k in range(count) for change in (rows.gain(k), rows.score_gain(k))]
    majority = {Task.REGRESSION: math.nan, Task.MULTILABEL: 0.0}.get(rows.task, max(last.constant.values))
    return {
        "gain_z": rows.gain().z,
        "score_z": rows.score_gain().z,
        "signal": max([*gains, *_floor_z(reading)]) / needed_z(len(gains), ERROR_RATE),
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
    """The same features from the curves only."""
    low, end = float(reading.val_loss.min()), float(reading.val_loss[-1])
    needed, noise = needed_z(len(reading) - 1, ERROR_RATE), reading.loss_noise(low) or 1e-9
    scores, chance = reading.val_score, reading.chance_score
    best = float(np.nanmax(scores)) if np.isfinite(scores).any() else math.nan
    fall = (best - float(scores[-1])) / (reading.score_noise(best) or 1e-9) if math.isfinite(best) else 0.0
    constant = reading.loss_noise(reading.chance_loss) or 1e-9

    def above(score: float) -> float:
        return math.nan if chance is None else (score - chance[0]) / max(chance[1], 1e-9)

    gains = [z for z in ((reading.chance_loss - low) / constant, above(best), *_floor_z(reading)) if math.isfinite(z)]
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


def _floor_z(reading: Reading) -> list[float]:
    """By how many standard errors other baselines are above the constant baseline."""
    if reading.chance_score is None:
        return []
    value, error = reading.chance_score
    return [(floor - value) / max(error, 1e-9) for _, floor in reading.floors]


def loss_share(rows: RowEvidence) -> float:
    """Return the mean loss as a share of that of the constant baseline."""
    return finite_mean(rows.loss) / max(1e-9, finite_mean(rows.constant_loss))


def _prediction_spread(rows: RowEvidence) -> float:
    if rows.task is Task.REGRESSION:
        scale = float(rows.labels.std()) or 1.0
        return float(rows.predictions.std()) / scale if np.isfinite(rows.predictions).all() else 0.0
    if not np.isfinite(rows.loss).all():
        return 0.0
    groups = np.unique(rows.labels, axis=0, return_inverse=True)[1].reshape(-1)
    inside = [rows.loss[groups == g] for g in range(int(groups.max()) + 1)]
    return float(np.sqrt(sum(((part - part.mean()) ** 2).sum() for part in inside) / len(rows)))


def sure_accuracy(rows: RowEvidence, share: float = 0.25) -> float:
    """Return the accuracy on the examples with the highest confidence; NaN without confidences."""
    if not np.isfinite(rows.confidence).all():
        return math.nan
    surest = np.argsort(-np.abs(rows.confidence), kind="stable")[: max(10, round(share * len(rows)))]
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


def only_class(rows: RowEvidence) -> int | None:
    """Return the class that is predicted for every example although others occur; None if there is none."""
    if rows.task not in (Task.BINARY, Task.MULTICLASS) or len(np.unique(rows.labels)) < 2:
        return None
    found = np.unique(rows.predictions)
    return int(found[0]) if len(found) == 1 else None


def turned(rows: RowEvidence) -> float:
    """How surely the predictions mean other labels than the examples have: 1 is significant at 1% over all pairs of labels.

    Examples of another label are predicted as "a" more often than those of label "a" are (a test of two shares); predictions of a
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
    """By how many standard errors the first share is above the second."""
    both = float(np.concatenate([one, other]).mean())
    error = math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
    return float(one.mean() - other.mean()) / error if error > 0 else 0.0


def _above_z(one: RowEvidence, other: RowEvidence) -> float:
    """By how many standard errors the loss of `one` is above that of `other`, both as shares of their constant baselines."""
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
