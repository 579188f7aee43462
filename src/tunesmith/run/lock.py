"""One process per run folder. The kernel drops the lock with its holder, so a stale one never blocks."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from tunesmith.errors import ResourceError


class RunLock:
    """Held as a context manager; a second holder gets a ResourceError that names the first one's process and host."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise ResourceError(
                f"is in use by {holder}",
                where=str(self.file.parent),
                fix="Wait for it, stop it, or give another --output_dir.",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, OSError):
        return "another process"
