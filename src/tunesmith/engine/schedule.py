"""The learning rate as a pure function of the step: equal to transformers' `get_scheduler` at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """`warmup` and `total` are in optimizer steps; `options` are what transformers calls lr_scheduler_kwargs."""

    kind: str
    peak: float
    warmup: int
    total: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            names = tuple(SCHEDULES)
            hint = did_you_mean(self.kind, names)
            raise ConfigError(f"lr_scheduler_type {self.kind!r} is not one of {', '.join(names)}", fix=hint)


def lr_at(step: int, schedule: Schedule) -> float:
    """The rate used by the optimizer step that follows `step` completed ones."""
    return schedule.peak * SCHEDULES[schedule.kind](step, schedule)


def _ramp(step: int, s: Schedule) -> float:
    return step / max(1, s.warmup)


def _progress(step: int, s: Schedule) -> float:
    return (step - s.warmup) / max(1, s.total - s.warmup)


def _linear(step: int, s: Schedule) -> float:
    if step < s.warmup:
        return _ramp(step, s)
    return max(0.0, (s.total - step) / max(1, s.total - s.warmup))


def _cosine(step: int, s: Schedule) -> float:
    if step < s.warmup:
        return _ramp(step, s)
    cycles = float(s.options.get("num_cycles", 0.5))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * _progress(step, s))))


def _cosine_with_restarts(step: int, s: Schedule) -> float:
    if step < s.warmup:
        return _ramp(step, s)
    progress = _progress(step, s)
    if progress >= 1.0:
        return 0.0
    cycles = float(s.options.get("num_cycles", 1))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))


def _polynomial(step: int, s: Schedule) -> float:
    end = float(s.options.get("lr_end", 1e-7))
    power = float(s.options.get("power", 1.0))
    if step < s.warmup:
        return _ramp(step, s)
    if step > s.total:
        return end / s.peak
    remaining = 1 - (step - s.warmup) / max(1, s.total - s.warmup)
    return float(((s.peak - end) * remaining**power + end) / s.peak)


def _constant(step: int, s: Schedule) -> float:
    return 1.0


def _constant_with_warmup(step: int, s: Schedule) -> float:
    return step / max(1.0, s.warmup) if step < s.warmup else 1.0


def _inverse_sqrt(step: int, s: Schedule) -> float:
    if step < s.warmup:
        return _ramp(step, s)
    timescale = int(s.options.get("timescale") or s.warmup or 10_000)
    return 1.0 / math.sqrt((step + timescale - s.warmup) / timescale)


def _floor_rate(s: Schedule) -> float:
    rate, absolute = s.options.get("min_lr_rate"), s.options.get("min_lr")
    if rate is not None and absolute is not None:
        raise ConfigError("give min_lr or min_lr_rate in lr_scheduler_kwargs, not both")
    if absolute is not None:
        return float(absolute) / s.peak
    if rate is None:
        raise ConfigError(f"{s.kind} needs min_lr or min_lr_rate in lr_scheduler_kwargs")
    return float(rate)


def _cosine_with_min_lr(step: int, s: Schedule) -> float:
    floor = _floor_rate(s)
    if step < s.warmup:
        return _ramp(step, s)
    cycles = float(s.options.get("num_cycles", 0.5))
    factor = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * _progress(step, s)))
    return max(0.0, factor * (1 - floor) + floor)


def _cosine_warmup_with_min_lr(step: int, s: Schedule) -> float:
    floor = _floor_rate(s)
    start = s.options.get("warmup_lr_rate")
    if step < s.warmup:
        if start is None:
            return (step + 1.0) / max(1.0, s.warmup)
        return float(start) + (1.0 - float(start)) * step / max(1, s.warmup - 1)
    cycles = float(s.options.get("num_cycles", 0.5))
    progress = (step - s.warmup + 1.0) / max(1.0, s.total - s.warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
    return max(0.0, factor * (1 - floor) + floor)


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 * (1.0 - math.cos(math.pi * x)),
    "1-sqrt": lambda x: 1.0 - math.sqrt(1.0 - x),
}


def _warmup_stable_decay(step: int, s: Schedule) -> float:
    decay = s.options.get("num_decay_steps")
    if decay is None:
        raise ConfigError("warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs")
    floor = float(s.options.get("min_lr_ratio", 0.0))
    stable = int(s.options.get("num_stable_steps") or s.total - s.warmup - int(decay))
    if step < s.warmup:
        up = step / max(1, s.warmup)
        return _SHAPES[s.options.get("warmup_type", "linear")](up) * (1.0 - floor) + floor
    if step < s.warmup + stable:
        return 1.0
    if step < s.warmup + stable + int(decay):
        done = (step - s.warmup - stable) / max(1, int(decay))
        kind = s.options.get("decay_type", "cosine")
        if kind == "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * float(s.options.get("num_cycles", 0.5)) * 2.0 * done))
        else:
            factor = 1.0 - done if kind == "linear" else 1.0 - math.sqrt(done)
        return max(0.0, factor * (1.0 - floor) + floor)
    return floor


SCHEDULES: dict[str, Callable[[int, Schedule], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
