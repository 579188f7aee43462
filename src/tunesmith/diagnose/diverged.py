"""Diverged: the loss left the finite numbers, blew up, or fell back to knowing nothing."""

from __future__ import annotations

import numpy as np

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import BLOWN_UP, COLLAPSED_FROM, NEAR_CHANCE, USUAL_RATE
from tunesmith.diagnose.verdict import make_finding, rate_flag
from tunesmith.findings import Finding


def check_diverged(reading: Reading) -> Finding | None:
    """A finding when training was lost. Needs no evaluation."""
    evidence, confidence = _not_finite(reading) or _blown_up(reading) or _never_left(reading) or ("", 0.0)
    if not evidence:
        return None
    return make_finding(reading, "diverged", evidence, _advice(reading), confidence=confidence, severity="error")


def _not_finite(reading: Reading) -> tuple[str, float] | None:
    run = reading.curves
    if not run.non_finite or len(run.train_loss) == 0:
        return None
    tail = run.train_loss.value[-20:]
    if run.ended != "NumericsError" and np.isfinite(tail).mean() > 0.5:
        return None
    return f"loss or gradient was not finite at step {run.non_finite[0]} ({len(run.non_finite)} such steps)", 0.99


def _blown_up(reading: Reading) -> tuple[str, float] | None:
    smooth = reading.smooth_train
    # Fewer steps are no curve: the last of 15 steps on 73 rows was one unlucky batch (granite on MRPC).
    if len(smooth) < 20:
        return None
    low, end, chance = float(smooth.min()), float(smooth[-max(5, len(smooth) // 10) :].mean()), reading.chance_loss
    at = int(reading.curves.train_loss.finite().step[int(np.argmin(smooth))])
    if end >= BLOWN_UP * chance and end >= 1.5 * low:
        return f"train loss rose from {low:.2f} (step {at}) to {end:.2f}; knowing nothing costs {chance:.2f}", 0.95
    if low <= COLLAPSED_FROM * chance and end >= NEAR_CHANCE * chance:
        return f"train loss had reached {low:.2f} (step {at}) and came back to {end:.2f}, the loss of chance", 0.9
    return None


def _never_left(reading: Reading) -> tuple[str, float] | None:
    """A rate far too high makes most encoders answer one class for ever, without any NaN."""
    if not (len(reading) and reading.rate_is("high") and not reading.frozen):
        return None
    end, chance = float(reading.train_loss[-1]), reading.chance_loss
    # Not asked: whether the score is above chance. At 30 times the rate it may be by a few points, and the rate is the reason.
    if end < NEAR_CHANCE * chance:
        return None
    return (
        f"train loss is {end:.2f} after {reading.step[-1]} steps at a rate of {reading.rate:g}; chance is {chance:.2f}",
        0.85,
    )


def _advice(reading: Reading) -> list[str]:
    lower = min(reading.rate / 10, USUAL_RATE) if reading.rate_is("high") else reading.rate / 5
    advice = [rate_flag(lower)]
    if reading.option("fp16", False):
        advice.append("--bf16 true --fp16 false")
    if not reading.option("warmup_steps", 0):
        advice.append("--warmup_steps 0.1")
    norm = reading.option("max_grad_norm", 1.0)
    if not 0 < float(norm) <= 1:
        advice.append("--max_grad_norm 1.0")
    return advice
