"""The plan of a run, computed before the first step: number of steps, learning rates, and when to evaluate and save."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from tunesmith.config.options import ScheduleName
from tunesmith.errors import ConfigError, did_you_mean, short_text

MOST_EPOCHS = 1_000_000
"""End steps of epochs, computed before the first step."""

Cadence = Literal["no", "steps", "epoch", "both"]


@dataclass(frozen=True)
class Calendar:
    """Steps at which something happens. `ends` are the last steps of epochs."""

    cadence: Cadence
    every: int = 0
    ends: frozenset[int] = frozenset()
    last: int | None = None

    def due(self, step: int) -> bool:
        """Return whether it happens after `step` completed steps."""
        if self.last is not None and step == self.last:
            return True
        if self.cadence in ("epoch", "both") and step in self.ends:
            return True
        if self.cadence == "both":  # counted from the last end: there it has just happened
            return (step - max((end for end in self.ends if end < step), default=0)) % self.every == 0
        return self.cadence == "steps" and step % self.every == 0

    def count(self, num_steps: int) -> int:
        """Return about how often it happens in a run of this many steps."""
        if self.cadence == "both":
            bounds = [0, *sorted(end for end in self.ends if end < num_steps), num_steps]
            return sum(-(-(end - start) // self.every) for start, end in pairwise(bounds))
        steps = num_steps // self.every if self.cadence == "steps" and self.every else 0
        ends = sum(end <= num_steps for end in self.ends) if self.cadence == "epoch" else 0
        return steps + ends + (self.last is not None)


@dataclass(frozen=True)
class Plan:
    """The experiment: everything the math depends on, and when to evaluate, save and read back losses."""

    num_steps: int
    epoch_ends: tuple[int, ...]
    schedule: Schedule
    seed: int
    max_grad_norm: float = 1.0
    evaluate: Calendar = field(default_factory=lambda: Calendar("no"))
    save: Calendar = field(default_factory=lambda: Calendar("no"))
    read_back_every: int = 1
    metric: str | None = None
    greater_is_better: bool = True
    patience: int | None = None

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, completed steps of the epoch) for the step that follows `step` completed ones."""
        epoch = bisect_right(self.epoch_ends, step)
        if epoch == len(self.epoch_ends):
            return epoch, 0
        return epoch, step - (self.epoch_ends[epoch - 1] if epoch else 0)

    def fraction(self, step: int) -> float:
        """Return the completed epochs after `step` steps, as a fraction."""
        epoch, inside = self.epoch_of(step)
        if epoch == len(self.epoch_ends):
            return float(epoch)
        start = self.epoch_ends[epoch - 1] if epoch else 0
        return epoch + inside / (self.epoch_ends[epoch] - start)


def epoch_ends_for(
    steps_in_epoch: Callable[[int], int] | Sequence[int], *, max_steps: int, num_epochs: float
) -> tuple[int, tuple[int, ...]]:
    """Return (number of steps, end step of each started epoch). `max_steps` > 0 overrides `num_epochs`, as in transformers.

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
            raise ConfigError("an epoch has no step: the training set is smaller than one batch and drop_last is on")
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
    """Return a number of steps; a float below 1 is a share of all steps, rounded up (as in transformers)."""
    if 0 < warmup_steps < 1:
        return math.ceil(num_steps * warmup_steps)
    return int(warmup_steps)


@dataclass(frozen=True)
class Schedule:
    """A schedule of transformers. `warmup` and `total` are in optimizer steps."""

    kind: str
    peak: float
    warmup: int
    total: int

    def __post_init__(self) -> None:
        known = get_args(ScheduleName)
        if self.kind not in known:
            fix = did_you_mean(self.kind, known)
            raise ConfigError(f"lr_scheduler_type {self.kind!r} is not one of {', '.join(known)}", fix=fix)

    @cached_property
    def factor(self) -> Callable[[int], float]:
        """Return transformers' function: completed steps -> factor of the peak learning rate."""
        import torch
        from transformers import get_scheduler

        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self.peak)
        try:
            scheduler = get_scheduler(self.kind, optimizer, self.warmup, self.total)
        except ValueError as error:
            raise ConfigError(f"lr_scheduler_type {self.kind}: {short_text(error)}") from None
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        return factor


def lr_at(step: int, schedule: Schedule) -> float:
    """Return the learning rate of the optimizer step that follows `step` completed ones."""
    return float(schedule.peak * schedule.factor(step))
