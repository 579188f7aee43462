"""What goes out of a run while it runs, and who works beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tunesmith.events import Event

Say = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]
"""Called with (what, done, in all): rows, or bytes while a file is read."""


class SideWork:
    """Where a run has work done that does not need it. Here is no other place: a job is done when its result is wanted."""

    def start(self, job: Callable[..., Any], *args: Any, progress: ShowProgress | None = None) -> Callable[[], Any]:
        """The function that is given back gives the result of `job(*args)`; with `progress`, the job is given it too."""
        told = {} if progress is None else {"progress": progress}
        return lambda: job(*args, **told)


@dataclass
class Watch:
    """Where a run's words and events go. `plan` is called with (steps in all, steps an epoch) before the first event.

    Without `pages` no curves and no report are drawn at the end: what a search over many runs wants.
    """

    say: Say = lambda text: None
    progress: ShowProgress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    pages: bool = True
    aside: SideWork = field(default_factory=SideWork)
    positive_name: str | None = None
    """The class that F1, precision and recall are about; set before the first event."""

    def title(self, metric: str) -> str:
        """The metric with the class it is about."""
        name = self.positive_name if metric in ("f1", "precision", "recall") else None
        return metric if name is None else f"{metric} of {name!r}"
