"""The shape of a run's curves in numbers: what fell late, how single steps scatter, how often a loss swings."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tunesmith.diagnosis.evidence import Reading
from tunesmith.diagnosis.signs import change_between, needed_z
from tunesmith.diagnosis.thresholds import ERROR_RATE, LEAST_CHANGE, SWING
from tunesmith.runs.series import Floats


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
