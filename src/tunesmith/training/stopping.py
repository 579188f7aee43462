"""Signals: SIGTERM and SIGINT ask a run to stop at the next safe point; a second signal ends the process immediately.

After the last step is saved there is no further safe point to wait for, and a signal raises where it arrives.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from tunesmith.errors import StoppedBySignal

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
        replaced = error is None or (isinstance(error, Exception) and not isinstance(error, StoppedBySignal))
        if replaced and self._at_once and self.signal:
            # A library caught the exception, or raised a different one (safetensors: ValueError).
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
