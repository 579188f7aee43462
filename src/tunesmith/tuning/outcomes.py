"""How a run of `--recipe best` ended, what its parts took, and what the time that is left is enough for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.recipes.deciding import FEWEST_PAIR_STEPS, PAIRS_IN_A_STEP
from tunesmith.session.settling import CONTRAST_STAGE, PAIR_STAGE

MARGIN = 1.15
"""How much longer than forecast a run may take."""
WARM_STEPS = 3
"""Steps of a start that are not timed: kernels are made in them."""
SHORTEST_START = 30
"""Steps: a shorter pair start is left out."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, stopped or failed. `score` is larger for better; seconds in all, of the steps and of those of the
    start, which come before the first one."""

    state: str
    metric: str | None = None
    score: float | None = None
    why: str | None = None
    seconds: float = 0.0
    step_seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    epochs: float = 0.0
    start: str | None = None
    start_steps: int = 0
    start_seconds: float = 0.0

    @property
    def other_seconds(self) -> float:
        """Of all but steps."""
        return max(self.seconds - self.step_seconds - self.start_seconds, 0.0)

    @property
    def row_seconds(self) -> float:
        """Of one row in one pass."""
        return self.step_seconds / max(self.rows * self.epochs, 1)


@dataclass
class StartClock:
    """Times the steps of a pair start or contrastive start. Each reads PAIRS_IN_A_STEP rows."""

    stage: str | None = None
    read: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and when."""
    total: int = 0

    def note(self, stage: str, done: int, total: int) -> bool:
        """Whether a tenth of the steps is done just now: enough to forecast the others."""
        if stage not in (PAIR_STAGE, CONTRAST_STAGE):
            return False
        before = self.read[-1][0] if self.read else 0
        self.stage, self.total = stage, total
        self.read.append((done, time.monotonic()))
        judged = max(total // 10, 2 * WARM_STEPS)
        return before < judged <= done

    @property
    def step_seconds(self) -> float:
        """Of one step; 0: too few were seen."""
        (first, began), (last, ended) = self.read[min(WARM_STEPS, len(self.read) - 1)], self.read[-1]
        return (ended - began) / (last - first) if last > first else 0.0

    def facts(self) -> dict[str, Any]:
        """What an Outcome keeps."""
        if not self.read:
            return {}
        done = self.read[-1][0]
        return {"start": self.stage, "start_steps": done, "start_seconds": done * self.step_seconds}


def shorten(config: RunConfig, timed: Outcome, left: float, rows: int, epochs: float) -> RunConfig:
    """The config of `auto` for fewer seconds than it needs: half of them for its pair start, the others for its passes.

    What is given stays. Without a timed start nothing is known, and the run is ended when the time is over.
    """
    if not timed.start_seconds:
        return config
    step = timed.start_seconds / timed.start_steps
    if config.pair_start is not None and step * config.pair_start > left:
        takes = f"--pair_start {config.pair_start} takes {step * config.pair_start:.0f} s"
        raise ConfigError(
            f"{takes}, and {left:.0f} s of --time_budget are left",
            fix=f"Give --pair_start {int(left / 2 / step)} or less, or a larger --time_budget.",
        )
    if config.num_train_epochs is not None or config.max_steps > 0 or config.pair_start is not None:
        return config
    steps = min(int(left / 2 / step), FEWEST_PAIR_STEPS) if timed.start == PAIR_STAGE else 0
    steps = steps if steps >= SHORTEST_START else 0
    passes = (left - steps * step) / MARGIN / (rows * step / PAIRS_IN_A_STEP)
    return replace(config, pair_start=steps, num_train_epochs=round(max(min(epochs, passes), 0.1), 2))
