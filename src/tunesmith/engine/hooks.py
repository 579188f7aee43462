"""What a caller may do inside an optimizer step. Every hook is None in an ordinary run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.tokens.batches import Batch, Window

MicroStep = Callable[[Batch, Any], torch.Tensor]
"""(micro-batch on the device, factor for its summed loss: a number, or where a captured step reads it) -> its share of the
window's loss, after the backward pass."""


@dataclass
class StepHooks:
    """Called by `train_step` in the order of the fields; `micro_step` stands in for forward and backward."""

    begin: Callable[[Window], None] | None = None
    micro_step: MicroStep | None = None
    substep_end: Callable[[], None] | None = None
    before_update: Callable[[], None] | None = None
    """Sees the gradients as the optimizer will: unscaled and clipped."""
    after_update: Callable[[torch.Tensor], None] | None = None
    """Gets the step's numbers, on the device. Gradients are still there, but after a replay."""
    capturable: bool = False
    """A replay need not call `micro_step`, and may call `after_update` when all is over."""
    sets_rate: bool = False
    """A scheduler object of the caller's sets the rate of the optimizer's groups, not the plan."""

    @property
    def inside(self) -> bool:
        """Whether a hook takes part in the step itself, which then cannot be replayed without it."""
        own = self.sets_rate or any((self.micro_step, self.after_update))
        return (own and not self.capturable) or any((self.substep_end, self.before_update))
