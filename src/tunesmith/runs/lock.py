"""The lock of a run folder: one process at a time may write there. The kernel drops it with its holder, so it is never stale."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import ResourceError
from tunesmith.files import disk_error, in_the_way, open_in_place, parse_json

log = logging.getLogger(__name__)

READERS_SECONDS = 5.0
"""How long a starting run waits for readers that only test whether the folder is in use."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run folder's lock, as it wrote it there."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Held as a context manager; a second holder gets a ResourceError that names the first one's process and host."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._take()
            _held.add(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except OSError as error:
            self.release()
            raise disk_error(error, self.file) from error
        return self

    def _take(self) -> int:
        """The descriptor of the locked file, which is still the file at this path after the lock was taken."""
        while True:
            descriptor = open_in_place(self.file)
            _require_own(descriptor, self.file)
            try:
                _lock_alone(descriptor)
            except BlockingIOError:
                holder = noted_holder(descriptor)
                os.close(descriptor)
                raise ResourceError(
                    f"is in use by {holder or 'another process'}",
                    where=str(self.file.parent),
                    fix="Wait for it, stop it, or set a different --output_dir.",
                ) from None
            except OSError as error:
                reason = error.strerror
                log.warning("%s: this file system has no locks (%s); start one run per folder", self.file, reason)
            if os.path.samestat(os.fstat(descriptor), self.file.lstat()):
                return descriptor
            os.close(descriptor)

    def release(self) -> None:
        """Releases the lock. It may be called twice."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __exit__(self, *error: object) -> None:
        self.release()


def _require_own(descriptor: int, file: Path) -> None:
    """A ResourceError for a file of that name that is not the lock of a run."""
    held = os.pread(descriptor, 4096, 0)
    if held and not held.startswith(b'{"pid": '):
        os.close(descriptor)
        raise in_the_way(file, "is not the lock of a run, so it is not written to")


def _lock_alone(descriptor: int) -> None:
    """Takes the exclusive lock. It waits for readers that test the lock for a moment; a holder is a BlockingIOError."""
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


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits until no other process holds the lock of this file, and holds it: for a moment, around a small change."""
    descriptor = open_in_place(file)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise disk_error(error, file) from error
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def is_lock(file: Path) -> bool:
    """Return whether this is the lock file of a run, held or not."""
    descriptor = open_lock(file)
    if descriptor is None:
        return False
    holder = noted_holder(descriptor)
    os.close(descriptor)
    return holder is not None


def open_lock(file: Path) -> int | None:
    """A descriptor of a lock file to be tested; None when there is none."""
    try:
        return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def read_holder(file: Path) -> str | None:
    """Who holds the lock of a run now, in words; None when it is free."""
    descriptor = open_lock(file)
    if descriptor is None:
        return None
    holder = str(noted_holder(descriptor) or "another process") if is_held(descriptor) else None
    os.close(descriptor)
    return holder


def is_held(descriptor: int) -> bool:
    """Whether a process holds the exclusive lock: tries to take a shared lock and releases it at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def noted_holder(descriptor: int) -> Holder | None:
    """The process that is noted in a lock file, whether or not it still holds it."""
    try:
        data = parse_json(os.pread(descriptor, 4096, 0))
        return Holder(int(data["pid"]), str(data["host"]))
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _close_in_child() -> None:
    """A forked child shares its parent's lock: without this, a worker that outlives a killed run would block the next."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


_held: set[int] = set()
os.register_at_fork(after_in_child=_close_in_child)
