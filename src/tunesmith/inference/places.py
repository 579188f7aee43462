"""Folders that several processes write to: on a shared disk, or in an object store that fsspec reaches (s3://, gs://).

A file is there whole or not at all. A claim keeps two processes from doing the same work; no output depends on it: `claimed` says
whether this process has the name for as long as the block runs. `names` and `exists` do not see files that are being written.
"""

from __future__ import annotations

import fcntl
import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tunesmith.errors import ConfigError, ResourceError
from tunesmith.runs.writing import TMP_PREFIX, make_folder, open_in_place, read_regular, write_file

CLAIMS = ".claims"
BEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
"""In a store without locks a claim holds while its text changes. After so long without one, its process is taken for dead."""
WHOLE_ON_CLOSE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"}
"""Stores in which an object appears under its name when its upload is complete."""


def is_remote(given: str) -> bool:
    """Whether this is a URL of fsspec that is not a path on this machine."""
    return "://" in given and not given.startswith(("file://", "local://"))


def open_place(given: str) -> Place:
    """The folder of a path or URL."""
    if not is_remote(given):
        return SharedFolder(Path(given.partition("://")[2] or given))
    fs, root = file_system(given)
    return Store(fs, root.rstrip("/"))


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, made by the client that is installed here, and the path in it."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ResourceError(f"{protocol}:// needs a client ({error})", where=url, fix="Install it with pip.") from None
    except ValueError as error:
        raise ConfigError(f"is not a URL that fsspec knows ({error})", where=url) from None
    return fs, str(path)


@dataclass(frozen=True)
class SharedFolder:
    """A folder on a disk; claims are locks, which the system releases when a process dies, however it dies."""

    path: Path
    poll_seconds: float = 0.5
    """Seconds between two looks at the work of other processes."""

    def names(self) -> set[str]:
        found = (p.relative_to(self.path) for p in self.path.rglob("*") if p.is_file())
        return {p.as_posix() for p in found if not any(part.startswith(".") for part in p.parts)}

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        return read_regular(self.path / name)

    def write(self, name: str, data: bytes) -> None:
        file = self.path / name
        make_folder(file.parent)
        for left in file.parent.glob(f"{glob.escape(TMP_PREFIX + file.name)}-*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        write_file(file, data)

    @contextmanager
    def claimed(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        file = self.path / CLAIMS / f"{name.replace('/', '%2F')}.lock"
        make_folder(file.parent)
        descriptor = open_in_place(file)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Store:
    """A folder in an fsspec file system; claims are leases. Should two processes do the same work, they write the same bytes."""

    fs: Any
    root: str
    poll_seconds: float = 5.0
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    """Claims of others: their text, and when it was first read here. Clocks of two machines are never compared."""

    def names(self) -> set[str]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.root)
        except FileNotFoundError:
            return set()
        below = (str(path).lstrip("/").removeprefix(self.root.lstrip("/")).lstrip("/") for path in found)
        return {name for name in below if not any(part.startswith(".") for part in name.split("/"))}

    def exists(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(f"{self.root}/{name}"))

    def read(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        path = f"{self.root}/{name}"
        whole = WHOLE_ON_CLOSE & ({self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol))
        aside = path if whole else f"{self.root}/{TMP_PREFIX}{uuid.uuid4().hex}"
        try:
            if not whole:
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(aside, data)
            if not whole:
                self.fs.mv(aside, path)
        except OSError as error:
            raise ResourceError(f"cannot be written ({error})", where=path) from None

    @contextmanager
    def claimed(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        claim = f"{CLAIMS}/{name.replace('/', '%2F')}"
        if wait or self._is_held(claim):
            yield wait
            return
        ended = Event()
        self.write(claim, f"{self.owner} 0".encode())
        if not self.read(claim).startswith(self.owner.encode()):  # another one wrote it at the same time
            yield False
            return
        beating = Thread(target=self._beat, args=(claim, ended), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            ended.set()
            beating.join()
            with suppress(OSError):  # a process that took this one for dead may have removed it
                self.fs.rm_file(f"{self.root}/{claim}")

    def _is_held(self, claim: str) -> bool:
        try:
            text = self.read(claim)
        except FileNotFoundError:
            return False
        known, since = self.seen.get(claim, (b"", 0.0))
        if text != known:
            self.seen[claim] = (text, time.monotonic())
            return True
        return time.monotonic() - since < LEASE_SECONDS

    def _beat(self, claim: str, ended: Event) -> None:
        beat = 0
        while not ended.wait(BEAT_SECONDS):
            beat += 1
            with suppress(ResourceError):  # a missed beat costs double work at most
                self.write(claim, f"{self.owner} {beat}".encode())


Place = SharedFolder | Store
