"""One process per run folder. The kernel drops the lock with its holder, so a stale one never blocks."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tunesmith.errors import ResourceError
from tunesmith.files import parse_json
from tunesmith.run.writing import disk_error, holding, open_in_place

log = logging.getLogger(__name__)

READERS_SECONDS = 5.0
"""How long a starting run waits for those who only look whether the folder is in use."""


class RunLock:
    """Held as a context manager; a second holder gets a ResourceError that names the first one's process and host."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None
        self._stack = ExitStack()

    def __enter__(self) -> RunLock:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._take()
        except OSError as error:
            raise disk_error(error, self.file) from error
        _held.add(descriptor)
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            self._stack.enter_context(holding(self.file.parent))
        except OSError as error:
            self.release()
            raise disk_error(error, self.file) from error
        return self

    def _take(self) -> int:
        """The lock file, locked: the one that stands at its name after the lock was given."""
        while True:
            descriptor = open_in_place(self.file)
            _require_own(descriptor, self.file)
            try:
                _lock_alone(descriptor)
            except BlockingIOError:
                holder = _read_holder(descriptor)
                os.close(descriptor)
                raise ResourceError(
                    f"is in use by {holder}",
                    where=str(self.file.parent),
                    fix="Wait for it, stop it, or give another --output_dir.",
                ) from None
            except OSError as error:
                reason = error.strerror
                log.warning("%s: this file system has no locks (%s); start one run per folder", self.file, reason)
            if os.path.samestat(os.fstat(descriptor), self.file.lstat()):
                return descriptor
            os.close(descriptor)

    def release(self) -> None:
        """Lets go; twice is fine."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None
        self._stack.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _require_own(descriptor: int, file: Path) -> None:
    """A ResourceError for a file of that name that holds something else than the note of a holder."""
    held = os.pread(descriptor, 4096, 0)
    if held and not held.startswith(b'{"pid": '):
        os.close(descriptor)
        raise ResourceError(
            "is not the lock of a run, so it is not written to",
            where=str(file),
            fix="Move it to another name or folder, then give the same command again.",
        )


def _lock_alone(descriptor: int) -> None:
    """The lock for this process alone. A reader who tests it for a moment is waited for; a holder is a BlockingIOError."""
    until = time.monotonic() + READERS_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises where one process holds it alone
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise
        time.sleep(0.002)


def read_holder(file: Path) -> str | None:
    """Who holds the lock of a run now, in words; None when nobody does."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _close_in_child() -> None:
    """A forked child shares its parent's lock: without this, a worker that outlives a killed run would block the next."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


_held: set[int] = set()
os.register_at_fork(after_in_child=_close_in_child)


def _read_holder(descriptor: int) -> str:
    try:
        holder = parse_json(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
