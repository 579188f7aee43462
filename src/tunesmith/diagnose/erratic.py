"""Erratic: the curve jumps. The remedy is a lower rate, a larger effective batch, warmup, clipping."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tunesmith.curves.series import Floats
from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import SIGMAS, SMALL_SWING, STEP_NOISE, SWING, USUAL_BATCH
from tunesmith.diagnose.verdict import make_finding, rate_flag
from tunesmith.findings import Finding


def check_erratic(reading: Reading) -> Finding | None:
    """A finding when validation swung up and came back, or when single steps scatter too widely."""
    swings = _swings(reading)
    noise = _step_noise(reading)
    large = [s for s in swings if s >= SWING]
    if not (large or len(swings) >= 2 or noise >= STEP_NOISE):
        return None
    if swings:
        low, high = float(reading.val_loss.min()), float(reading.val_loss.max())
        evidence = (
            f"validation loss rose and fell back {len(swings)} time{'s' * (len(swings) > 1)}, by up to {max(swings):.0%}, "
            f"between {low:.2f} and {high:.2f}"
        )
    else:
        evidence = (
            f"single steps scatter by {noise * reading.chance_loss:.2f} around the train loss of "
            f"{reading.train_loss[-1]:.2f} (effective batch {effective_batch(reading)})"
        )
    confidence = 0.85 if len(large) > 1 or noise >= 1.3 * STEP_NOISE else 0.7
    return make_finding(
        reading,
        "erratic",
        evidence,
        _advice(reading),
        confidence=confidence,
        swings=len(swings),
        step_noise=round(noise, 3),
    )


def _swings(reading: Reading) -> list[float]:
    """Relative size of each rise of the validation loss that was later undone, larger than its noise."""
    found = []
    turns = _turning_points(reading.val_loss)
    for before, peak, after in zip(turns, turns[1:], turns[2:], strict=False):
        size = min(peak - before, peak - after)
        if size > max(SIGMAS * 1.25 * reading.loss_noise(peak), SMALL_SWING * peak):
            found.append(float(size / max(before, after)))
    return found


def _turning_points(value: Floats) -> list[float]:
    kept = [float(value[0])] if len(value) else []
    for (a, b), (_, c) in pairwise(pairwise(value)):
        if (b - a) * (c - b) < 0:
            kept.append(float(b))
    return [*kept, float(value[-1])] if len(value) > 1 else kept


def _step_noise(reading: Reading) -> float:
    """Spread of steps around the smoothed curve, relative to chance. Robust: a few spikes do not make it."""
    raw = reading.curves.train_loss.finite()
    if len(raw) < 30:
        return 0.0
    rest = np.abs(raw.value - raw.smoothed().value)
    return float(1.2533 * rest.mean() / reading.chance_loss) if reading.chance_loss > 0 else 0.0


def effective_batch(reading: Reading) -> int:
    """Examples per optimizer step on one device."""
    size = int(reading.option("per_device_train_batch_size", 8))
    return size * int(reading.option("gradient_accumulation_steps", 1))


def _advice(reading: Reading) -> list[str]:
    batch = effective_batch(reading)
    bigger = []
    if batch < USUAL_BATCH:
        steps = int(reading.option("gradient_accumulation_steps", 1)) * math.ceil(USUAL_BATCH / batch)
        bigger = [f"--gradient_accumulation_steps {steps}"]
    lower = [rate_flag(reading.rate / 3)]
    # At batch 1 to 4 the noise is the batch; above that it is the rate.
    advice = bigger + lower if batch <= 4 else lower + bigger
    if not reading.option("warmup_steps", 0):
        advice.append("--warmup_steps 0.1")
    if not 0 < float(reading.option("max_grad_norm", 1.0)) <= 1:
        advice.append("--max_grad_norm 1.0")
    return advice
