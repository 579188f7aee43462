"""Is a run being trained, by whom, and asking it to stop. The lock of the run folder is the truth, not the pid in it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from tunesmith.errors import ResourceError
from tunesmith.run.layout import RunDir
from tunesmith.run.ownership import Holder, is_held, noted_holder, open_lock


def is_running(run: RunDir) -> bool:
    """Whether a living process holds the run folder."""
    handle = open_lock(run.lock_file)
    if handle is None:
        return False
    try:
        holder = noted_holder(handle)
        if holder is not None and holder.host == socket.gethostname():
            if not Path(f"/proc/{holder.pid}").exists() and Path("/proc/self").exists():
                return False
            if _listed(handle, holder.pid):  # answers without touching the lock
                return True
        return is_held(handle)
    finally:
        os.close(handle)


def stop_run(run: RunDir) -> Holder:
    """Sends SIGTERM to the process that trains this run: it saves at the next safe point and ends with 143."""
    fix = "Stop it where it was started."
    handle = open_lock(run.lock_file)
    if handle is None:
        raise ResourceError("the run is not being trained", where=run.name)
    try:
        holder = noted_holder(handle)
        if not is_held(handle):
            raise ResourceError("the run is not being trained", where=run.name)
        if holder is None or holder.host != socket.gethostname():
            where = f"on {holder.host}" if holder is not None else "by an unknown process"
            raise ResourceError(f"the run is being trained {where}, not on this machine", where=run.name, fix=fix)
        _terminate(handle, holder, run)
    finally:
        os.close(handle)
    return holder


def _terminate(handle: int, holder: Holder, run: RunDir) -> None:
    """Through a handle on the process: should it end first, the signal reaches no other process with its number."""
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


def _listed(handle: int, pid: int) -> bool:
    """Whether the kernel lists the process as holding a lock on this very file."""
    inode = os.fstat(handle).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    fields = (line.split() for line in lines if " FLOCK " in line)
    return any(len(f) >= 6 and f[4] == str(pid) and f[5].rpartition(":")[2] == str(inode) for f in fields)
