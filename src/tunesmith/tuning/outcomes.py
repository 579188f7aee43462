"""How a run of `--recipe best` ended, what its parts took, and what the time that is left is enough for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunesmith.config.options import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.pipeline.pair_warmup import PAIRS_IN_A_STEP
from tunesmith.pipeline.recipe import FEWEST_PAIR_STEPS, RunFacts, epochs_for

MARGIN = 1.15
"""How much longer than forecast a run may take."""
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


def passes_over(rows: int, config: RunConfig, batch: int) -> float:
    """Those of `auto`, or as given."""
    if config.num_train_epochs is not None:
        return config.num_train_epochs
    return epochs_for(RunFacts("", 384, 6, rows, 2, Task.BINARY), batch, config.gradient_accumulation_steps)[0]


def shorten_run(config: RunConfig, timed: Outcome, left: float, rows: int) -> RunConfig:
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
    steps = min(int(left / 2 / step), FEWEST_PAIR_STEPS)
    steps = steps if steps >= SHORTEST_START else 0
    most = passes_over(rows, config, config.decided.per_device_train_batch_size)
    passes = (left - steps * step) / MARGIN / (rows * step / PAIRS_IN_A_STEP)
    return replace(config, pair_start=steps, num_train_epochs=round(max(min(most, passes), 0.1), 2))
