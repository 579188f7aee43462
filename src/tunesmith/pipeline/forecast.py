"""What a run will need (time, memory, disk), and how fast it goes, from a few of its steps: seconds once, for each step, for each
token and for a save."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tunesmith.events import EpochStarted, Evaluated, Event, StepDone

SHORT_RUN = 0.2


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, the most memory held at once, bytes left on disk; measured, then scaled to all rows and steps."""

    device: str
    steps: int
    peak_bytes: int
    disk_bytes: int
    start_seconds: float
    once_seconds: float
    step_seconds: float
    evaluation_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """All of it, from the start of the process to its end."""
        begin = self.start_seconds + self.once_seconds
        return begin + self.step_seconds + self.evaluation_seconds + self.finish_seconds

    @property
    def is_short(self) -> bool:
        """Whether starting takes a large part of it. The second start on a machine is faster: files and kernels are cached."""
        return self.start_seconds + self.once_seconds > SHORT_RUN * self.seconds

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the sum in it."""
        return {**asdict(self), "seconds": self.seconds}


WARM_READS = 2
"""Reads of the numbers of steps that are slow: kernels are made there. A read is one step on a CPU, several on a GPU."""


@dataclass
class StepsRead:
    """Some steps, their tokens, and the seconds from the event before them, their journal lines included."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One more step."""
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds


class RunClock:
    """What took how long: the steps of one read together, each evaluation."""

    def __init__(self) -> None:
        self.reads: list[StepsRead] = []
        self.evaluations: list[float] = []
        self._last, self._shared = time.monotonic(), -1.0

    def on(self, event: Event) -> None:
        """A listener of the run."""
        if not isinstance(event, EpochStarted | StepDone | Evaluated):
            return  # safe points and saves lie between two steps and count for the later one
        now = time.monotonic()
        spent, self._last = now - self._last, now
        if isinstance(event, StepDone):
            if event.seconds != self._shared:  # the steps of one read share its time equally
                self.reads.append(StepsRead())
            self._shared = event.seconds
            self.reads[-1].add(event.tokens, spent)
        elif isinstance(event, Evaluated) and event.split == "validation":
            self.evaluations.append(event.seconds)


@dataclass(frozen=True)
class Pace:
    """Seconds of steps: once for the first ones, then for each step and for each token; and for a save between steps."""

    once: float
    step: float
    token: float
    save: float

    @classmethod
    def of(cls, reads: list[StepsRead], *, saved: bool) -> Pace:
        """By a line through the reads after the first; `saved`: the last step came after a save."""
        most = len(reads) - saved
        timed = reads[min(WARM_READS, most - 1) : most]
        counts, tokens, seconds = (np.array([getattr(r, n) for r in timed]) for n in ("steps", "tokens", "seconds"))
        step, token = np.linalg.lstsq(np.stack([counts, tokens], axis=1).astype(float), seconds, rcond=None)[0]
        if len(timed) < 3 or token <= 0:
            step, token = seconds.sum() / counts.sum(), 0.0
        elif step < 0:
            step, token = 0.0, seconds.sum() / tokens.sum()
        over = [max(r.seconds - step * r.steps - token * r.tokens, 0.0) for r in reads]
        return cls(sum(over[: len(reads) - len(timed) - saved]), float(step), float(token), over[-1] if saved else 0.0)

    def seconds(self, steps: int, tokens: float) -> float:
        """Of all steps of a run, without what is slow once."""
        return float(steps * self.step + tokens * self.token)
