"""Trained too short: both losses are still falling when the run ends."""

from __future__ import annotations

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import DONE, SMALL_GAP, STILL_FALLING, USUAL_RATE
from tunesmith.diagnose.verdict import epochs_flag, make_finding, planned_epochs, rate_flag, surety
from tunesmith.findings import Finding


def check_stopped_early(reading: Reading) -> Finding | None:
    """A finding when the last evaluation is the best, by more than noise, and training rows are not better known."""
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


def _advice(reading: Reading) -> list[str]:
    run = reading.curves
    advice = []
    if run.num_steps and run.last_step < 0.9 * run.num_steps and run.ended not in ("completed", "early_stopping"):
        advice.append(f"tunesmith resume: the run ended at step {run.last_step} of {run.num_steps}")
    advice.append(epochs_flag(2 * planned_epochs(reading)))
    if reading.rate < 2e-5 and not reading.frozen:
        advice.append(rate_flag(USUAL_RATE))
    return advice
