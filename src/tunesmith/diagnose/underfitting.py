"""Underfitting: training and validation are poor alike, and there is a reason in the settings."""

from __future__ import annotations

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import (
    BARELY_BELOW_CHANCE,
    PARTLY_LEARNT,
    SMALL_GAP,
    USUAL_HEAD_RATE,
    USUAL_RATE,
)
from tunesmith.diagnose.verdict import longer_flag, make_finding, rate_flag
from tunesmith.findings import Finding


def check_underfitting(reading: Reading) -> Finding | None:
    """A finding when little was learnt and nothing was memorised."""
    train, loss, chance = float(reading.train_loss[-1]), float(reading.val_loss[-1]), reading.chance_loss
    reason = _reason(reading)
    limit = PARTLY_LEARNT if reason else BARELY_BELOW_CHANCE
    if train < limit * chance or loss - train > SMALL_GAP * chance:
        return None
    score = f", {reading.metric} {reading.val_score[-1]:.3f}" if reading.metric else ""
    against = f" (always the most frequent class: {reading.chance_accuracy:.3f})" if reading.chance_accuracy else ""
    evidence = (
        f"after {reading.step[-1]} steps train loss is {train:.2f} and validation loss {loss:.2f}, "
        f"chance is {chance:.2f}{score}{against}" + (f"; {reason}" if reason else "")
    )
    confidence = 0.9 if reason else 0.65
    return make_finding(reading, "underfitting", evidence, _advice(reading), confidence=confidence, chance_loss=chance)


def _reason(reading: Reading) -> str | None:
    if reading.frozen:
        return "the encoder is frozen"
    if reading.rate_is("low"):
        return f"a learning rate of {reading.rate:g} hardly moves the weights"
    if float(reading.option("weight_decay", 0.0)) >= 1.0:
        return f"weight_decay {reading.config['weight_decay']:g} pulls the weights back"
    return None


def _advice(reading: Reading) -> list[str]:
    advice = []
    if reading.frozen:
        advice.append("leave out --freeze: the whole encoder learns then")
        if reading.rate < USUAL_HEAD_RATE:
            advice.append(f"or, with the encoder frozen, {rate_flag(USUAL_HEAD_RATE)}")
    elif reading.rate < 2e-5:
        advice.append(rate_flag(USUAL_RATE))
    if float(reading.option("weight_decay", 0.0)) >= 1.0:
        advice.append("--weight_decay 0.01")
    advice.append(longer_flag(reading))
    return advice
