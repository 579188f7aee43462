"""The processes of a run on several ranks, and which of them is gone when the others notice."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import TunesmithError, WorkerError
from tunesmith.train.runtime import Runtime

SECONDS_TO_DIE = 2.0
"""How long a survivor looks for a process that is going away: the others learn of a loss before it is complete."""

_LOST = re.compile(
    r"closed by peer|connection reset|timed? ?out|pair closure|broken pipe|no route|remote process exited|socket|nccl|gloo|"
    r"c10d|process group|recvvalue|sendbytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankRoster:
    """(host, process) of every rank, by rank."""

    places: tuple[tuple[str, int], ...]
    rank: int

    @classmethod
    def gather(cls, runtime: Runtime) -> RankRoster:
        """Asks every rank where it is; all ranks call it."""
        return cls(tuple(runtime.gather_objects((socket.gethostname(), os.getpid()))), runtime.rank)

    def explain(self, error: BaseException) -> WorkerError | None:
        """The error of a lost rank, naming it where it can be seen; None when the error is about something else."""
        if len(self.places) == 1 or isinstance(error, TunesmithError) or not _LOST.search(str(error)):
            return None
        until = time.monotonic() + SECONDS_TO_DIE
        gone = self._gone()
        while not gone and time.monotonic() < until:
            time.sleep(0.05)
            gone = self._gone()
        first = " ".join(str(error).split("\n")[0].split())[:200]
        who = ", ".join(gone) if gone else f"another rank ({first})"
        return WorkerError(
            f"{who} no longer answers; rank {self.rank} ends",
            fix="Its own output says why. The same command goes on from the last checkpoint.",
        )

    def dead(self) -> list[str]:
        """Ranks of this machine whose process has ended, in words."""
        return [text for text in self._gone() if "is stopped" not in text]

    def _gone(self) -> list[str]:
        """Ranks of this machine whose process is dead or stopped, in words."""
        found = []
        here = socket.gethostname()
        for rank, (host, pid) in enumerate(self.places):
            state = _state_of(pid) if host == here and rank != self.rank else "running"
            if state != "running":
                found.append(f"rank {rank} (process {pid} on {host}) {state} and")
        return found


def _state_of(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone" if Path("/proc/self").exists() else "running"
    return {"Z": "has died", "X": "has died", "T": "is stopped", "t": "is stopped"}.get(letter, "running")
