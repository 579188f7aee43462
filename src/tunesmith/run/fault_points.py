"""Named places where a test may make this process fail: TUNESMITH_FAULT=point:action:n. Does nothing without the variable."""

from __future__ import annotations

import os
import signal
import time

_counts: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Marks a place. On the n-th passage of the named point: kill, term, int, enospc, eio, sleep or raise."""
    wanted = os.environ.get("TUNESMITH_FAULT")
    if not wanted:
        return
    point, action, count = [*wanted.split(":"), "1"][:3]
    if point != name:
        return
    _counts[name] = _counts.get(name, 0) + 1
    if _counts[name] == int(count):
        _ACTIONS[action]()


def _raise_os_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def _raise() -> None:
    raise RuntimeError("a fault asked for by TUNESMITH_FAULT")


_ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "enospc": lambda: _raise_os_error(28),
    "eio": lambda: _raise_os_error(5),
    "sleep": lambda: time.sleep(600),
    "raise": _raise,
}
