"""When a run ends early: the best evaluation so far no longer improves, or a signal asks for it.

SIGTERM and SIGINT ask the run to stop at the next safe point; a second signal ends the process at once. Once the last step is
saved there is no further safe point to wait for: then a signal raises where it arrives.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from tunesmith.errors import ConfigError, StoppedBySignal, did_you_mean


@dataclass(frozen=True)
class BestSoFar:
    """Counters that survive a resume. `value` is the best metric, reached after `step` steps."""

    value: float | None = None
    step: int | None = None
    evaluations_without_gain: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict for the checkpoint."""
        return {"value": self.value, "step": self.step, "evaluations_without_gain": self.evaluations_without_gain}


def metric_value(metrics: dict[str, float | None], name: str) -> float | None:
    """The tracked metric, with or without the prefix `eval_`; a name that is not there is a ConfigError."""
    key = name.removeprefix("eval_")
    if key not in metrics:
        known = tuple(metrics)
        raise ConfigError(
            f"metric_for_best_model {name!r} is not among {', '.join(known)}", fix=did_you_mean(key, known)
        )
    return metrics[key]


def update_progress(
    progress: BestSoFar, value: float | None, step: int, *, greater_is_better: bool, min_delta: float = 0.0
) -> tuple[BestSoFar, bool]:
    """(new counters, whether this is the best so far). A value that is not finite never is.

    Any gain makes a new best; only a gain of more than `min_delta` resets the count that patience looks at.
    """
    if value is None or not math.isfinite(value):
        return replace(progress, evaluations_without_gain=progress.evaluations_without_gain + 1), False
    if progress.value is None:
        return BestSoFar(value, step, 0), True
    gain = value - progress.value if greater_is_better else progress.value - value
    waited = 0 if gain > min_delta else progress.evaluations_without_gain + 1
    if gain > 0:
        return BestSoFar(value, step, waited), True
    return replace(progress, evaluations_without_gain=waited), False


def is_exhausted(progress: BestSoFar, patience: int | None) -> bool:
    """Whether `patience` evaluations in a row brought no gain."""
    return patience is not None and progress.evaluations_without_gain >= patience


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """An evaluation that is given up because the run was asked to stop; it begins again when the run resumes."""


class StopRequest:
    """A context manager around a run. `signal` is the signal that arrived, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._at_once = False

    def raise_at_once(self) -> None:
        """From now on nothing is left to save: a signal, also one that came already, raises StoppedBySignal."""
        self._at_once = True
        if self.signal is not None:
            self._leave(self.signal)

    def interrupt(self, *_: object) -> None:
        """Raises `Interrupted` once a signal came: to be called between the batches of an evaluation."""
        if self.signal is not None:
            raise Interrupted

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if isinstance(error, Exception) and not isinstance(error, StoppedBySignal) and self._at_once and self.signal:
            # It was raised in the middle of a library, which made an error of its own of it (safetensors: ValueError).
            self._leave(self.signal)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # The last checkpoint is whole whatever happens now: leave at once.
            os._exit(128 + number)
        self.signal = number
        if self._at_once:
            self._leave(number)

    def _leave(self, number: int) -> None:
        raise StoppedBySignal(number, "after the last step; every step is saved: the same command finishes it")
