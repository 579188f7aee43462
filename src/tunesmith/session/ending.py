"""What is done to a run between its last step and its scores, by one that trains several runs for one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tunesmith.events import Event
from tunesmith.metrics.uncertainty import Score


@dataclass(frozen=True)
class RunEnding:
    """`enough` ends training after an event, with the weights as they are; `change` is given the model before it is scored.

    `thresholds`, `lines` (beside what the recipe decided) and `scores` (beside those of the splits) are stored with the run.
    """

    enough: Callable[[Event], bool] = lambda event: False
    change: Callable[[Any], None] = lambda model: None
    thresholds: tuple[float, ...] | None = None
    lines: tuple[str, ...] = ()
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)
