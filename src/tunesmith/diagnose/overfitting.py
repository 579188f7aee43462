"""Overfitting: training rows are learnt by heart while validation gets worse."""

from __future__ import annotations

import math

import numpy as np

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import (
    FEW_ROWS,
    MEMORISED,
    RISE_ALONE,
    RISE_WITH_WORSE_SCORE,
    SCORE_GAP,
    SIGMAS,
    TRAIN_FELL,
)
from tunesmith.diagnose.verdict import early_stop_step, epochs_flag, make_finding, planned_epochs, rate_flag, surety
from tunesmith.findings import Finding


def check_overfitting(reading: Reading) -> Finding | None:
    """A finding when validation loss rose beyond its noise while training loss fell, or when the gap is wide."""
    return _from_rise(reading) or _from_gap(reading)


def _from_rise(reading: Reading) -> Finding | None:
    at, loss, train = reading.best, reading.val_loss, reading.train_loss
    low, end = float(loss[at]), float(loss[-1])
    rise, noise = end - low, SIGMAS * reading.loss_noise(low)
    if at == len(reading) - 1 or rise <= noise or not train[-1] <= (1 - TRAIN_FELL) * train[at]:
        return None
    known_by_heart = train[-1] <= MEMORISED * end
    worse = rise >= RISE_WITH_WORSE_SCORE * low and _score_fell(reading) > 1
    if not (worse or (rise >= RISE_ALONE * low and known_by_heart)):
        return None
    evidence = (
        f"validation loss rose {low:.2f} to {end:.2f} after step {reading.step[at]} "
        f"while train loss fell {train[at]:.2f} to {train[-1]:.2f}"
    )
    stop = early_stop_step(reading)
    if stop is not None and reading.curves.ended != "early_stopping":
        evidence += (
            f"; early stopping (patience 2) would have ended the run at step {stop} of {reading.curves.last_step}"
        )
    return make_finding(
        reading,
        "overfitting",
        evidence,
        _advice(reading, at),
        confidence=surety(rise, noise, floor=0.6),
        rise=rise,
        noise=noise,
        lowest_loss_step=int(reading.step[at]),
    )


def _score_fell(reading: Reading) -> float:
    """How far the last score is below the best, in standard errors."""
    scores = reading.val_score
    if not np.isfinite(scores).any() or not math.isfinite(scores[-1]):
        return 0.0
    best = float(np.nanmax(scores))
    return (best - float(scores[-1])) / reading.score_noise(abs(best))


def _from_gap(reading: Reading) -> Finding | None:
    seen, unseen = float(reading.train_score[-1]), float(reading.val_score[-1])
    if not (seen - unseen >= SCORE_GAP and reading.train_loss[-1] <= MEMORISED * reading.val_loss[-1]):
        return None
    evidence = (
        f"{reading.metric} is {seen:.3f} on training rows and {unseen:.3f} on validation rows "
        f"(losses {reading.train_loss[-1]:.2f} and {reading.val_loss[-1]:.2f})"
    )
    confidence = surety(seen - unseen, SIGMAS * reading.score_noise(unseen), floor=0.5)
    return make_finding(reading, "overfitting", evidence, _advice(reading, reading.best), confidence=confidence)


def _advice(reading: Reading, at: int) -> list[str]:
    best_epochs = float(reading.epoch[at])
    advice = []
    if math.ceil(best_epochs) < planned_epochs(reading):
        advice.append(epochs_flag(math.ceil(best_epochs)))
    if reading.option("early_stopping_patience", None) is None:
        advice.append("--early_stopping_patience 2 --load_best_model_at_end true")
    if 0 < reading.curves.train_rows < FEW_ROWS:
        advice.append(f"label more rows: there are {reading.curves.train_rows} to train on")
    elif best_epochs < 1.5:
        advice.append(rate_flag(reading.rate / 2.5))
    if float(reading.option("weight_decay", 0.0)) < 0.01:
        advice.append("--weight_decay 0.01")
    return advice
