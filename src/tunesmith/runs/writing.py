"""The one place that opens files for writing. A write is a new file in the real folder, renamed into place when it is whole:
never through a link, never into a pipe or device, never over what stands under the name of the new file."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import ResourceError

TMP_PREFIX = ".tmp-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MOVE = "Remove it or move it away, then run the same command again."


def kind_of(path: Path) -> str | None:
    """What stands at this name, links not followed: "a file", "a folder", "a link", "a pipe", ...; None when nothing does."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def require_plain(path: Path) -> None:
    """A ResourceError when something other than a plain file stands where a file is to be written."""
    try:
        kind = kind_of(path)
    except OSError as error:
        raise disk_error(error, path) from error
    if kind not in (None, "a file"):
        raise ResourceError(f"is {kind}, so no file is written there", where=str(path), fix=_MOVE)


def in_the_way(path: Path, problem: str) -> ResourceError:
    """The error for a file or folder of the user in a place that we would write to."""
    fix = "Move it to another name or folder, then give the same command again."
    return ResourceError(problem, where=str(path), fix=fix)


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents where they do not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def create(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """A new file, open for writing. Whatever stands at that name already, a link among it, is a FileExistsError."""
    return open(os.open(path, _NEW, mode), "wb")


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block succeeds: readers see the old bytes or the new ones.

    A failed write raises a ResourceError and leaves the old file unchanged.
    """
    require_plain(path)
    tmp: Path | None = None
    try:
        file, tmp = _create_aside(path, mode)
        with file:
            yield file
            file.flush()
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.lstat().st_mode))
            os.fsync(file.fileno())
        os.replace(tmp, path)
        fsync_path(path.parent)
    except BaseException as error:
        if tmp is not None:
            tmp.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def _create_aside(path: Path, mode: int) -> tuple[BinaryIO, Path]:
    """A new file next to `path`, under the first name that is free."""
    for number in count():
        tmp = path.with_name(f"{TMP_PREFIX}{path.name}-{os.getpid()}{number or ''}")
        try:
            return create(tmp, mode=mode), tmp
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def write_file(path: Path, data: bytes) -> None:
    """Replaces a small file, whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that must not be there yet: for folders that this process has just made."""
    with create(path) as file:
        file.write(data)


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """A descriptor of a plain file. A pipe, socket, device or folder is a ResourceError, and nothing waits for it.

    Without `follow` a link is one, too: for files that are changed in place.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        kind = kind_of(path.resolve() if follow else path)
        if kind in (None, "a file"):
            raise
        raise ResourceError(f"is {kind}, not a file", where=str(path), fix=_MOVE) from error
    kind = _KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode))
    if kind is not None:
        os.close(descriptor)
        raise ResourceError(f"is {kind}, not a file", where=str(path), fix=_MOVE)
    return descriptor


def open_in_place(path: Path) -> int:
    """A descriptor to read and append to a plain file, made when it is not there. One with a second name gets bytes of
    its own first: the other name may be a copy that a person made."""
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=False)
    if os.fstat(descriptor).st_nlink == 1:
        return descriptor
    os.close(descriptor)
    write_file(path, read_regular(path))
    return open_regular(path, os.O_RDWR | os.O_APPEND, follow=False)


def read_regular(path: Path) -> bytes:
    """The bytes of a plain file; see `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def require_same(path: Path, known: os.stat_result) -> None:
    """A ResourceError when what stands at a path is not the file or folder that is known."""
    try:
        same = os.path.samestat(known, path.stat())
    except OSError:
        same = False
    if not same:
        raise ResourceError(
            "was removed, renamed or replaced while the run wrote to it; nothing more is written",
            where=str(path),
            fix="Put it back, then give the same command again.",
        )


def disk_error(error: OSError, path: Path, bytes_needed: int = 0) -> ResourceError:
    """The error for a failed write: the path, the reason, the bytes needed and free."""
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB free"
    except OSError:
        free = "free space unknown"
    needed = f", about {bytes_needed / 1e6:.1f} MB needed" if bytes_needed else ""
    kind = os.strerror(error.errno) if error.errno is not None else str(error)
    try:
        saved = any(path.parent.glob("checkpoint-*"))
    except OSError:
        saved = False
    fix = "Free some space, repair the disk or choose another folder, then give the same command again."
    if saved:
        fix = "Earlier checkpoints are intact: free some space or repair the disk, then give the same command again."
    return ResourceError(f"cannot be written: {kind} ({free}{needed})", where=str(path), fix=fix)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def known_hash(file: Path) -> str:
    """Return `hash_file(file)`, computed once per process unless the file changed."""
    return _hash_once(file, *file_version(file))


@functools.lru_cache(maxsize=256)
def _hash_once(file: Path, *version: int) -> str:
    return hash_file(file)


def file_version(file: Path) -> tuple[int, ...]:
    """Return numbers that change with every write to a file: device, inode, size, mtime and ctime."""
    info = file.stat()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def folder_version(folder: Path) -> tuple[tuple[object, ...], ...]:
    """Return a value that changes if a file of the folder is written, replaced, added or removed."""
    return tuple((file.name, *file_version(file)) for file in sorted(folder.iterdir()) if file.is_file())


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/tunesmith`, by default `~/.cache/tunesmith`."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "tunesmith"


def fsync_path(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
