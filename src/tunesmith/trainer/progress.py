"""Where a `train()` call stands: what the loop's events add up to between two log lines."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Sums since the last log line and over the whole call, in optimizer steps."""

    first_step: int
    started: float = field(default_factory=time.time)
    logged_step: int = 0
    loss_since_log: float = 0.0
    loss_total: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    reported_rate: float | None = None
    """What a `_get_learning_rate` of the user's said of the last step."""
    epoch: int = 0
    epoch_open: bool = False
    """An epoch has begun whose end was not announced yet."""
    steps_in_epoch: int = 0
    announced_step: int = 0
    """The last step whose end the callbacks were told about."""
    ended_epochs: list[int] = field(default_factory=list)
    """The step each finished epoch ended at."""

    def __post_init__(self) -> None:
        self.logged_step = self.announced_step = self.first_step

    @property
    def rate(self) -> float | None:
        """The learning rate of the last step, as it is logged."""
        return self.learning_rate if self.reported_rate is None else self.reported_rate

    def add(self, loss: float | None, grad_norm: float | None, learning_rate: float) -> None:
        """Counts one step that was read back."""
        self.loss_since_log += 0.0 if loss is None else loss
        self.grad_norm = grad_norm
        self.learning_rate = learning_rate

    def mean_loss(self, step: int) -> float:
        """The mean loss since the last log line; starts a new sum."""
        mean = self.loss_since_log / max(step - self.logged_step, 1)
        self.loss_total += self.loss_since_log
        self.loss_since_log = 0.0
        self.logged_step = step
        return mean

    def training_loss(self, step: int) -> float:
        """The mean loss over this call."""
        return (self.loss_total + self.loss_since_log) / max(step - self.first_step, 0.001)
