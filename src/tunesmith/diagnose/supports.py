"""How well each verdict explains the signs of a run: a product of soft conditions, brought to probabilities."""

from __future__ import annotations

import math

from tunesmith.diagnose.features import Features
from tunesmith.diagnose.thresholds import (
    ABOVE_CONSTANT,
    DRIFT,
    FAR_ABOVE,
    FEW_ROWS,
    HIGH_RATE,
    IGNORED_CLASS,
    IGNORED_SHARE,
    LARGE_RISE,
    LATE_SIZE,
    LEAST_CHANGE,
    LITTLE_WORK,
    LOW_RATE,
    MISMATCH,
    NOTHING_LEARNT,
    PLATEAU,
    PLATEAU_OF_TWO,
    RANDOM_RATIO,
    RANDOM_SHARE,
    SAME_ANSWERS,
    SIGNAL,
    STEP_NOISE,
    SURE_AND_WRONG,
    SURE_OF_TWO,
    SWING_EVERY,
    TRAIN_ABOVE,
)

FLOOR = 0.01
"""The support of a verdict whose signs are absent: the rest of a doubt."""


def over(value: float, limit: float, width: float, *, unknown: float = 0.5) -> float:
    """0 below the limit, 1 above it, one half at it; `width` is where it is 0.73. A sign that is not known says nothing."""
    if math.isnan(value):
        return unknown
    x = (value - limit) / width
    return 1 / (1 + math.exp(-x)) if abs(x) < 40 else float(x > 0)


def under(value: float, limit: float, width: float, *, unknown: float = 0.5) -> float:
    """The opposite of `over`."""
    return 1 - over(value, limit, width, unknown=1 - unknown)


def weigh_verdicts(f: Features) -> dict[str, float]:
    """Verdict -> probability among these; `healthy` is 0 unless the score is above the best constant beyond its error."""
    supports = {
        "healthy": _healthy(f),
        "diverged": _diverged(f),
        "erratic": _erratic(f),
        "overfitting": _overfitting(f),
        "calibration_drift": _drift(f),
        "underfitting": _underfitting(f),
        "stopped_too_early": _stopped(f),
        "no_signal": _no_signal(f),
        "label_noise": _label_noise(f),
        "split_mismatch": _mismatch(f),
        "class_ignored": _ignored(f),
    }
    if not f.above > ABOVE_CONSTANT:
        supports["healthy"] = 0.0
    if not f.ignored:
        supports["class_ignored"] = -FLOOR  # out of the question
    supports["underfitting"] += FLOOR  # what is left to say of a run at chance that has no other sign
    weights = {code: value + (FLOOR if code != "healthy" or value > 0 else 0.0) for code, value in supports.items()}
    whole = sum(weights.values())
    return {code: value / whole for code, value in sorted(weights.items(), key=lambda item: -item[1])}


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))


def _high(f: Features) -> float:
    return 0.0 if f.frozen else over(_log(f.rate), _log(HIGH_RATE), 0.05)


def _enough_work(f: Features) -> float:
    return over(_log(f.work), _log(LITTLE_WORK), 0.06) * (0.05 if f.frozen else 1.0)


def _above(f: Features) -> float:
    return over(f.above, ABOVE_CONSTANT, 0.5)


def _collapsed(f: Features) -> float:
    return under(f.spread, SAME_ANSWERS, 0.002, unknown=0.4)


def _healthy(f: Features) -> float:
    """Above the constant, without a rise, and training rows are not left unlearnt."""
    rise = over(f.rise, DRIFT, 0.03) * _risen(f)
    slow = over(f.lowest, 0.75, 0.04) * over(f.train, 0.75, 0.04) * under(f.lowest, 5.0, 0.1)
    return 0.8 * _above(f) * (1 - rise) * (1 - 0.5 * slow) * (1 - 0.9 * _high(f) * over(f.lowest, 0.5, 0.05))


def _signal(f: Features) -> float:
    """Whether anything was ever better than the constant."""
    return over(f.signal, SIGNAL, 0.08)


def _diverged(f: Features) -> float:
    """A high rate that left nothing learnt, or the same answer for every row."""
    lost = over(f.last, NOTHING_LEARNT - 0.03, 0.02)
    return _high(f) * max(lost, 0.9 * _collapsed(f) * over(f.last, 0.9, 0.02))


def _erratic(f: Features) -> float:
    """Swings of the validation loss, single steps that scatter, or a high rate that did learn."""
    many = max(2.0, f.evaluations / SWING_EVERY)
    swings = 0.9 * min(1.0, f.swings / many) if f.swings > 1 else 0.2 * f.swings
    noise = f.step_noise / max(1.0, 1.0 if math.isnan(f.train) else f.train)
    noisy = over(noise, max(STEP_NOISE, f.batch_noise), 0.05)
    half = 0.8 * _high(f) * under(f.last, NOTHING_LEARNT - 0.03, 0.02) * over(f.lowest, 0.45, 0.05)
    risen = 0.9 * _high(f) * over(f.rise_z, 1.0, 0.1) * over(f.train, 0.05, 0.02)
    return max(swings * (1 - 0.2 * _memorised(f)), 0.9 * noisy, half, risen)


def _risen(f: Features) -> float:
    """Whether the validation loss rose beyond its error, and by more than a trifle of the constant's loss."""
    return over(f.rise_z, 1.0, 0.1) * over(f.rise * f.lowest, LEAST_CHANGE, 0.01)


def _memorised(f: Features) -> float:
    return under(f.train, 0.5 * f.last, 0.05)


def _overfitting(f: Features) -> float:
    """Training rows are known by heart while validation got worse beyond its error, or is no better than the constant."""
    rose = _risen(f) * max(over(f.rise, LARGE_RISE, 0.05), over(f.score_fall_z, 1.0, 0.1) * over(f.rise, 0.1, 0.02))
    gap = over(f.last, 0.9, 0.04) * (1 - _above(f))
    gap *= max(_few_rows(f) * under(f.train, 0.3, 0.04), 0.8 * _signal(f) * under(f.train, 0.5, 0.05))
    mismatch = max(_mismatch(f), 0.8 * min(1.0, f.swings / 2))
    return _memorised(f) * max(rose * max(_signal(f), _few_rows(f)), gap) * (1 - 0.9 * mismatch)


def _few_rows(f: Features) -> float:
    return under(f.train_rows or math.nan, FEW_ROWS, 20)


def _drift(f: Features) -> float:
    """The loss rose and the score held."""
    rose = _risen(f) * over(f.rise, DRIFT, 0.02) * under(f.rise, LARGE_RISE, 0.05)
    return 0.9 * rose * _above(f) * under(f.score_fall_z, 1.0, 0.1) * _memorised(f) * (1 - _mismatch(f))


def _underfitting(f: Features) -> float:
    """Both losses poor alike, with a reason: little work, a low rate, a frozen encoder; or a model too small."""
    alike = under(f.last - f.train, 0.2 + 0.1 * f.train + 0.5 * max(0.0, f.train - 1), 0.04)
    little = under(_log(f.work), _log(LITTLE_WORK), 0.06) * over(f.last, 0.45, 0.05)
    low = under(_log(f.rate), _log(LOW_RATE), 0.05) * over(f.last, 0.5, 0.05)
    frozen = (0.9 if f.frozen else 0.0) * over(f.last, 0.45, 0.05)
    small = 0.35 * over(f.train, 0.7, 0.05) * over(f.last, 0.75, 0.05) * _signal(f)
    far = 0.9 * over(f.train, FAR_ABOVE, 0.1, unknown=0.0)
    begun = 0.3 * (over(f.train, NOTHING_LEARNT, 0.02) + over(f.train, 0.975, 0.01)) * (1 - _above(f))
    return max(alike * max(low, frozen, small, begun, far), little) * (1 - _high(f))


def _stopped(f: Features) -> float:
    """Above the constant, and most of the gain came late: the next steps would bring more."""
    late = over(f.late_fall, 0.4, 0.05) * over(f.late_z, 2.5, 0.3) * (0.7 + 0.5 * over(f.late_fall, 0.65, 0.05))
    late *= over(f.late_size, LATE_SIZE, 0.01)
    near = under(f.last - f.train, 0.2, 0.04)
    reason = 0.15 if f.frozen or f.rate <= LOW_RATE else 1.0
    cut = 0.9 * over(f.late_fall, 0.3, 0.05) * near if f.unfinished else 0.0
    return reason * max(cut, over(f.last, 0.62, 0.05) * _above(f) * late * near) * (1 - _high(f))


def _usual(f: Features) -> float:
    """Settings that learn what there is to learn."""
    return _enough_work(f) * (1 - _high(f)) * over(_log(f.rate), _log(LOW_RATE), 0.05)


def _no_signal(f: Features) -> float:
    """A usual run in which nothing was ever better than the constant on validation rows, whatever training did."""
    few = 0.5 if _few_rows(f) > 0.5 and f.train < 0.5 else 1.0
    far = over(f.train, FAR_ABOVE, 0.1, unknown=0.0)
    return 0.95 * (1 - _signal(f)) * _usual(f) * (1 - _above(f)) * few * (1 - _mismatch(f)) * (1 - far)


def _label_noise(f: Features) -> float:
    """Something was learnt, but the rows that the model is surest of are wrong as often as others."""
    two = f.classes == 2
    validation = under(f.sure, SURE_OF_TWO if two else SURE_AND_WRONG, 0.015, unknown=0.0)
    validation *= over(f.plateau, PLATEAU_OF_TWO if two else PLATEAU, 0.03, unknown=0.0)
    training = over(f.train_above_z, TRAIN_ABOVE, 0.2, unknown=0.0) * over(f.train - f.last, LEAST_CHANGE, 0.01)
    training *= over(f.train, 0.5, 0.03)
    value = over(f.random, RANDOM_SHARE, 0.03, unknown=0.0) * over(f.random_ratio, RANDOM_RATIO, 1.0, unknown=0.0)
    value *= over(f.train, 0.5, 0.03)  # labels without a meaning are not learnt in a few epochs
    unknown = math.isnan(f.sure) and math.isnan(f.random)
    blurred = 0.5 * over(f.train, 0.6, 0.04) * over(f.last, 0.75, 0.04) * over(f.gain_z, 2.0, 0.5) * unknown
    usual = _usual(f) * (1 - 0.9 * over(f.ignored, IGNORED_SHARE + 0.04, 0.01))
    return usual * _signal(f) * max(validation, training, value, blurred) * (1 - _mismatch(f))


def _mismatch(f: Features) -> float:
    """Training rows not yet trained on cost far less than validation rows, or validation scores below the constant."""
    many = over(f.train_rows or math.nan, 120, 15, unknown=1.0)
    gap = over(f.first - f.fresh, MISMATCH, 0.015, unknown=0.0) * under(f.fresh, 1.05, 0.05) * (0.2 + 0.8 * many)
    gap *= over(f.gap_z, 3.0, 0.3, unknown=0.0)
    turned = under(f.score_z, -4.0, 0.4, unknown=0.0) * under(f.sure, 0.25, 0.05, unknown=0.0)
    soon = under(f.score_z, -5.0, 0.4, unknown=0.0) * under(f.epochs, 4.5, 0.3) * over(f.train_z, 8.0, 0.5, unknown=0.0)
    below = max(under(f.score_z, -8.0, 0.5, unknown=0.0), turned, soon)
    below *= over(f.train_z, 4.0, 0.4, unknown=0.0) * over(f.last, 1.05, 0.02)
    apart = over(f.last - f.train, 0.7, 0.05) * over(f.lowest, 0.97, 0.02) * under(f.epochs, 4.5, 0.3)
    apart *= over(f.last, 1.2, 0.04) * over(f.train_z, 4.0, 0.4, unknown=0.0) * (1 - _few_rows(f))
    other = over(f.turned, 1.0, 0.1, unknown=0.0) * under(f.train, 0.9, 0.03)
    return _enough_work(f) * (1 - _high(f)) * max(gap, below, 0.35 * apart, other)


def _ignored(f: Features) -> float:
    """Much was learnt, and classes with many rows are never predicted."""
    share = over(f.ignored, IGNORED_SHARE, 0.01) * over(f.ignored_most, IGNORED_CLASS, 0.005)
    learnt = over(f.gain_z, 3.0, 0.5) * under(f.last, 0.93, 0.02)
    lone = over(f.majority, 0.8, 0.03, unknown=0.0) * over(f.ignored, 0.02, 0.005) * over(f.gain_z, 2.5, 0.3)
    usual = _enough_work(f) * (1 - _high(f))
    return 0.9 * usual * max(share * learnt, 0.8 * lone) * (1 - 0.9 * _mismatch(f))
