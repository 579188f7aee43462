"""The time that was spent on a folder, over crashes and over several processes, and the end of a time budget.

Each process has a file: its name holds when it started, its modification time when it was last alive. The time spent is the
length of the union of these spans, so that a pause does not count and eight processes at once count once.
"""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path

from tunesmith.runs.writing import disk_error, make_folder, write_new

BEAT_SECONDS = 0.5


class TimeUp(KeyboardInterrupt):
    """The time budget is spent. Treated as an interrupt: code that names any other failure lets it through.

    Raised by `Clock.beat` alone, never by an alarm: one that rings during an import leaves half a module behind.
    """


class Clock:
    """The clock of one process among those that share a folder; `budget` is in seconds, None: no end."""

    def __init__(self, folder: Path, budget: float | None) -> None:
        self._folder = folder
        self._last = time.time()
        make_folder(folder)
        self._file = folder / f"{self._last:.6f}-{socket.gethostname()}-{os.getpid()}"
        write_new(self._file, b"")
        self._end = None if budget is None else self._last + budget - self.spent()
        self.reserve = 0.0
        """Seconds before the end that are kept for something else: the budget counts as spent when only they are left."""

    def beat(self, *_: object) -> None:
        """This process is alive; TimeUp when the budget is spent. Costs nothing when called often."""
        now = time.time()
        if self.left(now) <= 0:
            raise TimeUp
        if now - self._last > BEAT_SECONDS:
            self._last = now
            try:
                os.utime(self._file)
            except OSError as error:
                raise disk_error(error, self._file) from error

    def left(self, now: float | None = None) -> float:
        """Seconds until the time is up, less the reserve; infinite without a budget."""
        return math.inf if self._end is None else self._end - self.reserve - (time.time() if now is None else now)

    def spent(self) -> float:
        """Seconds in which at least one process was at work, up to now."""
        spans = [(float(p.name.split("-")[0]), p.stat().st_mtime) for p in self._folder.iterdir() if p != self._file]
        spans.append((float(self._file.name.split("-")[0]), time.time()))
        total, reached = 0.0, 0.0
        for start, end in sorted(spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total
