"""Healthy: better than chance beyond noise, and no other rule objects."""

from __future__ import annotations

import math

import numpy as np

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import NEAR_CHANCE, SIGMAS
from tunesmith.diagnose.verdict import make_finding, surety
from tunesmith.findings import Finding


def check_healthy(reading: Reading) -> Finding | None:
    """A finding when the run learnt something that holds on validation rows."""
    at, chance = reading.best, reading.chance_loss
    low = float(reading.val_loss[at])
    noise = SIGMAS * reading.loss_noise(low)
    if not (low <= NEAR_CHANCE * chance or reading.at_chance() is False):
        return None
    scores = reading.val_score
    score = ""
    if reading.metric and np.isfinite(scores).any():
        best = int(np.nanargmax(scores))
        score = f", {reading.metric} {abs(scores[best]):.3f} at step {reading.step[best]}"
    reached = f"validation loss reached {low:.2f} at step {reading.step[at]} (chance: {chance:.2f})"
    evidence = f"{reached}{score}; at the end it is {reading.val_loss[-1]:.2f}"
    return make_finding(
        reading,
        "healthy",
        evidence,
        _advice(reading, at),
        confidence=surety(max(0.0, chance - low), max(noise, math.ulp(1.0)), floor=0.55),
        severity="info",
    )


def _advice(reading: Reading, at: int) -> list[str]:
    advice = []
    if at < len(reading) - 1 and reading.option("load_best_model_at_end", True) is False:
        advice.append("--load_best_model_at_end true: the last weights are not the best ones")
    advice.append(f"--seed {int(reading.option('seed', 42)) + 1}: a second seed shows how much of the score is luck")
    return advice
