"""What a run will do, worked out before the first step. Frozen: the loop reads it and never decides on its own.

The learning rate is a pure function of the step: equal to transformers' `get_scheduler` at every step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tunesmith.errors import ConfigError, did_you_mean

MOST_EPOCHS = 1_000_000
"""The end of each epoch is worked out before the first step."""

Cadence = Literal["no", "steps", "epoch", "both"]


@dataclass(frozen=True)
class Calendar:
    """At which steps something happens. `ends` are the steps at which epochs end."""

    cadence: Cadence
    every: int = 0
    ends: frozenset[int] = frozenset()
    last: int | None = None
    delay: float = 0.0

    def due(self, step: int) -> bool:
        """Whether it happens after `step` completed steps."""
        if step < self.delay:
            return False
        if self.last is not None and step == self.last:
            return True
        if self.cadence in ("epoch", "both") and step in self.ends:
            return True
        if self.cadence == "both":  # counted from the last end: there it has just happened
            return (step - max((end for end in self.ends if end < step), default=0)) % self.every == 0
        return self.cadence == "steps" and step % self.every == 0

    def count(self, num_steps: int) -> int:
        """About how often it happens in a run of this many steps."""
        if self.cadence == "both":
            bounds = [0, *sorted(end for end in self.ends if end < num_steps), num_steps]
            return sum(-(-(end - start) // self.every) for start, end in pairwise(bounds))
        steps = num_steps // self.every if self.cadence == "steps" and self.every else 0
        ends = sum(end <= num_steps for end in self.ends) if self.cadence == "epoch" else 0
        return steps + ends + (self.last is not None)


@dataclass(frozen=True)
class Plan:
    """The experiment: everything the maths depends on, and when to evaluate, save and read back losses."""

    num_steps: int
    epoch_ends: tuple[int, ...]
    schedule: Schedule
    seed: int
    max_grad_norm: float = 1.0
    nan_action: Literal["stop", "skip"] = "stop"
    evaluate: Calendar = field(default_factory=lambda: Calendar("no"))
    save: Calendar = field(default_factory=lambda: Calendar("no"))
    read_back_every: int = 1
    metric: str | None = None
    greater_is_better: bool = True
    patience: int | None = None
    min_delta: float = 0.0

    def epoch_of(self, step: int) -> tuple[int, int]:
        """(epoch, steps done inside it) of the step that follows `step` completed ones."""
        epoch = bisect_right(self.epoch_ends, step)
        if epoch == len(self.epoch_ends):
            return epoch, 0
        return epoch, step - (self.epoch_ends[epoch - 1] if epoch else 0)

    def fraction(self, step: int) -> float:
        """Epochs done after `step` steps, as a fraction."""
        epoch, inside = self.epoch_of(step)
        if epoch == len(self.epoch_ends):
            return float(epoch)
        start = self.epoch_ends[epoch - 1] if epoch else 0
        return epoch + inside / (self.epoch_ends[epoch] - start)


def epoch_ends_for(
    steps_in_epoch: Callable[[int], int] | Sequence[int], *, max_steps: int, num_epochs: float
) -> tuple[int, tuple[int, ...]]:
    """(number of steps, end step of each epoch begun). `max_steps` > 0 wins over `num_epochs`, as in transformers.

    `steps_in_epoch` is `Batches.steps_in_epoch`, or a list whose last entry stands for all later epochs.
    """
    ends: list[int] = []
    total = 0
    while True:
        epoch = len(ends)
        if callable(steps_in_epoch):
            size = steps_in_epoch(epoch)
        else:
            size = steps_in_epoch[min(epoch, len(steps_in_epoch) - 1)]
        if size < 1:
            raise ConfigError(
                "an epoch has no step: the training set is smaller than one batch and --dataloader_drop_last is on"
            )
        epochs = max_steps / size if max_steps > 0 else num_epochs
        if epoch == 0 and epochs > MOST_EPOCHS:
            raise ConfigError(
                f"the run has {epochs:g} epochs; the limit is {MOST_EPOCHS}", fix="Train for fewer steps."
            )
        total += size
        ends.append(total)
        if max_steps > 0:
            if total >= max_steps:
                return max_steps, tuple(ends)
        elif len(ends) >= num_epochs:
            part = num_epochs - int(num_epochs)
            steps = total if part == 0 else total - size + -(-int(size * part * 10**6) // 10**6)
            return max(1, steps), tuple(ends)


def warmup_steps_for(warmup_steps: float, num_steps: int) -> int:
    """An int is a number of steps; a float below 1 is a share of all steps, rounded up (as in transformers)."""
    if 0 < warmup_steps < 1:
        return math.ceil(num_steps * warmup_steps)
    return int(warmup_steps)


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
