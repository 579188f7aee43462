"""What goes out of a run while it runs, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tunesmith.events import Event
from tunesmith.metrics.uncertainty import Score
from tunesmith.run.layout import RunDir

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""Called with (what, done, in all): rows, or bytes while a file is read."""


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. `scores[split][metric]` has value, interval and n; `diagnosis` is in lines."""

    run: RunDir
    scores: dict[str, dict[str, Score]]
    steps: int
    best_step: int | None
    diagnosis: tuple[str, ...]


@dataclass
class Watch:
    """Where a run's words and events go. `plan` is called with (steps in all, steps an epoch) before the first event."""

    say: Say = lambda text: None
    progress: Progress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
