"""Trained too short: both losses are still falling when the run ends."""

from __future__ import annotations

from dataclasses import replace

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import (
    DONE,
    ENOUGH_STEPS,
    GOES_ON,
    NEAR_CHANCE,
    PARTLY_LEARNT,
    SMALL_GAP,
    STILL_FALLING,
    USUAL_RATE,
)
from tunesmith.diagnose.verdict import longer_flag, make_finding, rate_flag, surety
from tunesmith.findings import Finding


def check_stopped_early(reading: Reading) -> Finding | None:
    """A finding when validation still falls beyond noise, or when learning has only begun and goes on."""
    found = _still_falling(reading) or _only_begun(reading) or _few_steps(reading)
    if found is None or not reading.running:
        return found
    run = reading.curves
    left = f"let it go on: step {run.last_step}" + (f" of {run.num_steps}" if run.num_steps else "")
    return replace(found, code="still_learning", severity="info", advice=(left,))


def _still_falling(reading: Reading) -> Finding | None:
    loss, train = reading.val_loss, reading.train_loss
    fall, end = float(loss[-2] - loss[-1]), float(loss[-1])
    noise = reading.loss_noise(end)
    falling = fall >= max(STILL_FALLING * float(loss[-2]), noise) and train[-1] < train[-2]
    if reading.best != len(reading) - 1 or not falling or end <= DONE * reading.chance_loss:
        return None
    if end - train[-1] > SMALL_GAP * reading.chance_loss:
        return None
    evidence = (
        f"validation loss still fell {loss[-2]:.2f} to {end:.2f} between steps {reading.step[-2]} and {reading.step[-1]}, "
        f"and train loss {train[-2]:.2f} to {train[-1]:.2f}"
    )
    confidence = surety(fall, noise, floor=0.55)
    return make_finding(reading, "stopped_too_early", evidence, _advice(reading), confidence=confidence, fall=fall)


def _only_begun(reading: Reading) -> Finding | None:
    """Validation is hardly below chance, training goes on falling and is far from known by heart."""
    train, chance = reading.train_loss, reading.chance_loss
    low, end = float(reading.val_loss.min()), float(reading.val_loss[-1])
    begun = NEAR_CHANCE * chance < low + reading.loss_noise(low) and low <= 0.98 * chance
    held = end - low <= reading.loss_noise(low)
    if not (begun and held and train[-1] >= 0.5 * chance and train[-1] <= (1 - GOES_ON) * train[-3]):
        return None
    evidence = (
        f"validation loss {end:.2f} is hardly below chance ({chance:.2f}) after {reading.step[-1]} steps, "
        f"and train loss still falls ({train[-3]:.2f} to {train[-1]:.2f} over the last two evaluations)"
    )
    return make_finding(reading, "stopped_too_early", evidence, _advice(reading), confidence=0.55)


def _few_steps(reading: Reading) -> Finding | None:
    """A small training set makes few steps an epoch: training loss falls, validation holds, and most is left to learn."""
    train, loss, chance = reading.train_loss, reading.val_loss, reading.chance_loss
    held = float(loss[-1] - loss.min()) <= reading.loss_noise(float(loss.min()))
    if not (
        int(reading.step[-1]) < ENOUGH_STEPS and held and train[-1] < train[0] and train[-1] >= PARTLY_LEARNT * chance
    ):
        return None
    evidence = (
        f"{reading.step[-1]} steps are few: train loss fell {train[0]:.2f} to {train[-1]:.2f} and validation loss "
        f"went {loss[0]:.2f} to {loss[-1]:.2f} (chance: {chance:.2f}): most is left to learn"
    )
    return make_finding(reading, "stopped_too_early", evidence, _advice(reading), confidence=0.6)


def _advice(reading: Reading) -> list[str]:
    run = reading.curves
    advice = []
    if run.num_steps and run.last_step < 0.9 * run.num_steps and run.ended not in ("completed", "early_stopping"):
        advice.append(f"tunesmith resume: the run ended at step {run.last_step} of {run.num_steps}")
    advice.append(longer_flag(reading))
    if reading.rate < 2e-5 and not reading.frozen:
        advice.append(rate_flag(USUAL_RATE))
    return advice
