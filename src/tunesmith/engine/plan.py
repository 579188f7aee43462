"""What a run will do, worked out before the first step. Frozen: the loop reads it and never decides on its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunesmith.engine.schedule import Schedule
from tunesmith.errors import ConfigError

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
        return self.cadence in ("steps", "both") and step % self.every == 0

    def count(self, num_steps: int) -> int:
        """About how often it happens in a run of this many steps."""
        steps = num_steps // self.every if self.cadence in ("steps", "both") and self.every else 0
        ends = sum(end <= num_steps for end in self.ends) if self.cadence in ("epoch", "both") else 0
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
        import math

        return math.ceil(num_steps * warmup_steps)
    return int(warmup_steps)
