"""Is a run being trained, by whom, and asking it to stop. The lock of the run folder is the truth, not the pid in it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import ResourceError
from tunesmith.files import parse_json
from tunesmith.run.layout import RunDir


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run folder's lock, as it wrote it there."""

    pid: int
    host: str


def is_running(run: RunDir) -> bool:
    """Whether a living process holds the run folder."""
    try:
        handle = os.open(run.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        holder = _read_holder(handle)
        here = holder is not None and holder.host == socket.gethostname()
        if holder is not None and here:
            if not Path(f"/proc/{holder.pid}").exists() and Path("/proc/self").exists():
                return False
            if _listed(handle, holder.pid):
                return True
        return _is_held(handle)
    finally:
        os.close(handle)


def stop_run(run: RunDir) -> Holder:
    """Sends SIGTERM to the process that trains this run: it saves at the next safe point and ends with 143."""
    fix = "Stop it where it was started."
    try:
        handle = os.open(run.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise ResourceError("the run is not being trained", where=run.name) from None
    try:
        holder = _read_holder(handle)
        if not _is_held(handle):
            raise ResourceError("the run is not being trained", where=run.name)
        if holder is None or holder.host != socket.gethostname():
            where = f"on {holder.host}" if holder is not None else "by an unknown process"
            raise ResourceError(f"the run is being trained {where}, not on this machine", where=run.name, fix=fix)
        _terminate(handle, holder, run)
    finally:
        os.close(handle)
    return holder


def _terminate(handle: int, holder: Holder, run: RunDir) -> None:
    """Through a handle on the process: should it end meanwhile, no other process with its number is hit."""
    if holder.pid <= 1 or holder.pid == os.getpid():
        raise ResourceError(f"process {holder.pid} is not one to stop", where=run.name)
    try:
        process = os.pidfd_open(holder.pid)
    except OSError:
        raise ResourceError("the run is not being trained", where=run.name) from None
    try:
        if Path("/proc/locks").exists() and not _listed(handle, holder.pid):
            raise ResourceError(f"process {holder.pid} is named in the lock file but does not hold it", where=run.name)
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise ResourceError(f"process {holder.pid} belongs to another user", where=run.name) from None
    except ProcessLookupError:
        raise ResourceError("the run is not being trained", where=run.name) from None
    finally:
        os.close(process)


def _read_holder(handle: int) -> Holder | None:
    try:
        data = parse_json(os.pread(handle, 4096, 0))
        return Holder(int(data["pid"]), str(data["host"]))
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _listed(handle: int, pid: int) -> bool:
    """Whether the kernel lists the process as holding a lock on this very file."""
    inode = os.fstat(handle).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    fields = (line.split() for line in lines if " FLOCK " in line)
    return any(len(f) >= 6 and f[4] == str(pid) and f[5].rpartition(":")[2] == str(inode) for f in fields)


def _is_held(handle: int) -> bool:
    """Asks the kernel for a shared lock and gives it back at once. Rare: /proc/locks answers first where it can."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False
