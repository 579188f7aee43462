"""The time that was spent on a folder, over crashes and over several processes, and an end that cuts in.

Each process has a file: its name holds when it started, its modification time when it was last alive. The time spent is the
length of the union of these spans, so that a pause does not count and eight processes at once count once.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tunesmith.run.writing import disk_error, make_folder, write_new

BEAT_SECONDS = 0.5


class TimeUp(BaseException):
    """The time budget is spent. No Exception: libraries that handle those must not take it for one of theirs."""


class Clock:
    """The clock of one process among those that share a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = time.time()
        make_folder(folder)
        self._file = folder / f"{self._last:.3f}-{socket.gethostname()}-{os.getpid()}"
        write_new(self._file, b"")

    def beat(self, *_: object) -> None:
        """This process is alive. Costs nothing when called often."""
        now = time.time()
        if now - self._last > BEAT_SECONDS:
            self._last = now
            try:
                os.utime(self._file)
            except OSError as error:
                raise disk_error(error, self._file) from error

    def spent(self) -> float:
        """Seconds in which at least one process was at work, up to now."""
        spans = [(float(p.name.split("-")[0]), p.stat().st_mtime) for p in self._folder.iterdir() if p != self._file]
        spans.append((float(self._file.name.split("-")[0]), time.time()))
        total, reached = 0.0, 0.0
        for start, end in sorted(spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises TimeUp in the main thread after so many seconds; None: never.

    What a run has on disk is whole at every moment, so it may be cut anywhere. The alarm repeats, since an exception that is
    raised in a destructor is lost.
    """
    if seconds is None:
        yield
        return
    if seconds <= 0:
        raise TimeUp

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
