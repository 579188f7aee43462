"""The other ranks of a run: where they are, and the end of this one when one of them is lost."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tunesmith.errors import TunesmithError, WorkerError
from tunesmith.training.runtime import Runtime

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
        return self.lost(", ".join(gone) if gone else f"another rank ({first})")

    def lost(self, who: str) -> WorkerError:
        """The error that ends this rank."""
        fix = "Its own output says why. The same command resumes from the last checkpoint."
        return WorkerError(f"{who} no longer answers; rank {self.rank} ends", fix=fix)

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


LOOK_EVERY = 1.0
GRACE_SECONDS = 6.0
"""How long a rank may take to notice a loss by itself. gloo raises at once; NCCL can wait for ever, in C++."""

log = logging.getLogger(__name__)


@contextmanager
def rank_watch(runtime: Runtime) -> Iterator[RankRoster]:
    """Inside, the loss of another rank ends this one: as a WorkerError where it shows, else with exit 7.

    Leave it after a barrier: a rank that goes home earlier counts as lost.
    """
    roster = RankRoster.gather(runtime)
    if runtime.world == 1:
        yield roster
        return
    done = threading.Event()
    threading.Thread(target=_look, args=(roster, done), name="tunesmith-rank-watch", daemon=True).start()
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _when_terminated(roster)) if on_main else None
    after: Any = before
    try:
        yield roster
    except RuntimeError as error:
        lost = roster.explain(error)
        if lost is None:
            raise
        after = signal.SIG_IGN  # the launcher's SIGTERM is on its way: it must not come before the message and exit 7
        raise lost from error
    except WorkerError:
        after = signal.SIG_IGN
        raise
    finally:
        done.set()
        if on_main:
            signal.signal(signal.SIGTERM, after)


def _look(roster: RankRoster, done: threading.Event) -> None:
    since: float | None = None
    while not done.wait(LOOK_EVERY):
        gone = roster.dead()
        if not gone:
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= GRACE_SECONDS:
            log.error("%s left this rank waiting; rank %d ends", " ".join(gone).removesuffix(" and"), roster.rank)
            os._exit(WorkerError.exit_code)


def _when_terminated(roster: RankRoster) -> Any:
    """Launchers end the survivors with SIGTERM: a rank that can see the reason says it."""

    def arrived(number: int, frame: FrameType | None) -> None:
        gone = roster.dead()
        if gone:
            signal.signal(number, signal.SIG_IGN)
            raise roster.lost(gone[0])
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return arrived
