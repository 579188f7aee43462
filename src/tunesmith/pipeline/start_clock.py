"""The time of the steps of a pair start, which come before the first one of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tunesmith.pipeline.watch import PAIR_STAGE

WARM_STEPS = 3
"""Steps that are not timed: kernels are made in them."""


@dataclass
class StartClock:
    """Times the steps of a pair start, each of PAIRS_IN_A_STEP rows. `read` has the steps done, and when."""

    read: list[tuple[int, float]] = field(default_factory=list)
    total: int = 0

    def note(self, stage: str, done: int, total: int) -> bool:
        """Whether a tenth of the steps is done just now: enough to forecast the others."""
        if stage != PAIR_STAGE:
            return False
        before = self.read[-1][0] if self.read else 0
        self.total = total
        self.read.append((done, time.monotonic()))
        judged = max(total // 10, 2 * WARM_STEPS)
        return before < judged <= done

    @property
    def step_seconds(self) -> float:
        """Of one step; 0: too few were seen."""
        (first, began), (last, ended) = self.read[min(WARM_STEPS, len(self.read) - 1)], self.read[-1]
        return (ended - began) / (last - first) if last > first else 0.0

    @property
    def rest_seconds(self) -> float:
        """Of the steps that were not taken."""
        return (self.total - self.read[-1][0]) * self.step_seconds if self.read else 0.0

    def facts(self) -> dict[str, Any]:
        """Its steps and their seconds, as `Outcome` of `--recipe best` has them."""
        if not self.read:
            return {}
        done = self.read[-1][0]
        return {"start_steps": done, "start_seconds": done * self.step_seconds}
