"""The signs of one run as plain numbers, from its rows where it kept them, else from its curves with a rougher error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from tunesmith.diagnosis.evidence import Reading
from tunesmith.diagnosis.random_labels import random_share
from tunesmith.diagnosis.shapes import batch_noise, count_swings, error_of_mean, fresh_loss, late_fall, step_noise
from tunesmith.diagnosis.signs import (
    RowSigns,
    answer_spread,
    change_between,
    describe_answers,
    gain_of_score,
    ignored_classes,
    loss_share,
    needed_z,
    overconfidence,
    plateau,
    sure_accuracy,
    turned,
)
from tunesmith.diagnosis.thresholds import ERROR_RATE, ROUGH_GAIN, USUAL_BATCH
from tunesmith.diagnosis.verdict import effective_batch
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence


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
    batch = effective_batch(reading)
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
