"""Looks after the other ranks of this machine, so that none outlives a job that has lost one."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tunesmith.errors import WorkerError
from tunesmith.train.ranks import RankRoster
from tunesmith.train.runtime import Runtime

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
            raise WorkerError(
                f"{gone[0]} no longer answers; rank {roster.rank} ends",
                fix="Its own output says why. The same command goes on from the last checkpoint.",
            )
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return arrived
