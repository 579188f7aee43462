"""Reading and writing files safely.

Reading: plain files only, a bounded number of bytes, JSON of bounded depth; a pipe, socket or device is refused without waiting.
Writing: a new file in the same folder, renamed into place when it is complete; never through a link, and never over a file that
another process has just created.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import ResourceError

MAX_JSON_BYTES = 64_000_000
"""A JSON file larger than this is not one of a run or a model (the largest tokenizer.json has about 35 MB)."""
MAX_DEPTH = 40
MAX_DIGITS = 18
"""Digits of a whole number: what fits 64 bits."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadFile(ValueError):
    """A file that can't be used. The message is the end of a sentence that starts with the name of the file."""


def open_plain(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """Open a plain file for reading; anything else is a BadFile. With `follow`, links to plain files are accepted."""
    try:
        _require_plain(os.stat(path, follow_symlinks=follow))
        # The path may be replaced between check and open. With O_NONBLOCK, opening a pipe returns immediately.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        handle = os.open(path, flags)
    except FileNotFoundError:
        if os.path.islink(path):
            raise BadFile("is a link that leads nowhere") from None
        raise
    except (OSError, ValueError) as error:
        raise error if isinstance(error, BadFile) else BadFile(_reason(error)) from None
    try:
        _require_plain(os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_plain(path: str | Path, limit: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a plain file; more than `limit` are a BadFile."""
    with open_plain(path, follow=follow) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
        except OSError as error:
            raise BadFile(_reason(error)) from None
    if size > limit or len(data) > limit:
        raise BadFile(f"is larger than {limit:,} bytes")
    return data


def read_json(path: str | Path, *, follow: bool = False) -> Any:
    """Return the content of a JSON file; see `parse_json`."""
    return parse_json(read_plain(path, MAX_JSON_BYTES, follow=follow))


def parse_json(data: bytes | str, *, mend: bool = True) -> Any:
    """Return the value, with None for NaN and infinities. Damage, deep nesting and numbers with too many digits are a BadFile.

    `mend` replaces incomplete characters by "?", so that every text can be printed and written.
    """
    try:
        text = data.decode().removeprefix("\ufeff") if isinstance(data, bytes) else data
        value = _DECODER.decode(text)
    except BadFile:
        raise
    except RecursionError:
        raise BadFile("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start})") from None
    except ValueError as error:
        raise BadFile(f"is not JSON ({error})") from None
    broken = mend and "\\ud" in text.lower()
    if not broken and text.count("[") + text.count("{") <= MAX_DEPTH:
        return value
    return _checked(value, broken=broken)


def _checked(value: Any, depth: int = 0, *, broken: bool) -> Any:
    if depth > MAX_DEPTH:
        raise BadFile("is nested too deeply")
    if isinstance(value, dict):
        return {_whole_text(k, broken): _checked(v, depth + 1, broken=broken) for k, v in value.items()}
    if isinstance(value, list):
        return [_checked(v, depth + 1, broken=broken) for v in value]
    return _whole_text(value, broken) if isinstance(value, str) else value


def _whole_text(text: str, broken: bool) -> str:
    return _SURROGATE.sub("?", text) if broken else text


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise BadFile(f"contains a number with {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float | None:
    value = float(digits)
    return None if value in (float("inf"), float("-inf")) else value


def _no_number(word: str) -> None:
    """Return None for NaN and infinities."""


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_int=_whole, parse_float=_real)


def _require_plain(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise BadFile(f"is {_KINDS.get(stat.S_IFMT(info.st_mode), 'something else')}, not a file")


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read ({getattr(error, 'strerror', None) or error})"


# Writing


TMP_PREFIX = ".tmp-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVE = "Remove it or move it away, then run the same command again."


def kind_of(path: Path) -> str | None:
    """Return what is at this path, without following links: "a file", "a folder", "a link", "a pipe", ...; None if nothing is."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def require_plain(path: Path) -> None:
    """Raise a ResourceError if something other than a plain file is in the place of a file to write."""
    try:
        kind = kind_of(path)
    except OSError as error:
        raise disk_error(error, path) from error
    if kind not in (None, "a file"):
        raise ResourceError(f"is {kind}, so no file is written there", where=str(path), fix=_MOVE)


def in_the_way(path: Path, problem: str) -> ResourceError:
    """Return the error for a user's file or folder in a place that we would write to."""
    fix = "Move it to another name or folder, then run the same command again."
    return ResourceError(problem, where=str(path), fix=fix)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents if they do not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def create(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Create a file and open it for writing. If the name is taken, even by a link, it is a FileExistsError."""
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
    """Create a temporary file next to `path`."""
    for number in count():
        tmp = path.with_name(f"{TMP_PREFIX}{path.name}-{os.getpid()}{number or ''}")
        try:
            return create(tmp, mode=mode), tmp
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file completely or not at all."""
    with replacing(path) as file:
        file.write(data)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, in a folder that this process has created."""
    with create(path) as file:
        file.write(data)


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Return a descriptor of a plain file. A pipe, socket, device or folder is a ResourceError, without waiting for it.

    Without `follow` so is a link: for files that are changed in place.
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
    """Return a descriptor to read and append to a plain file, which is created if missing.

    A file with a second name (hard link) is copied first, because the other name may be a user's copy.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=False)
    if os.fstat(descriptor).st_nlink == 1:
        return descriptor
    os.close(descriptor)
    write_file(path, read_regular(path))
    return open_regular(path, os.O_RDWR | os.O_APPEND, follow=False)


def read_regular(path: Path) -> bytes:
    """Return the bytes of a plain file; see `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def require_same(path: Path, known: os.stat_result) -> None:
    """Raise a ResourceError if the path is no longer the known file or folder."""
    try:
        same = os.path.samestat(known, path.stat())
    except OSError:
        same = False
    if not same:
        raise ResourceError(
            "was removed, renamed or replaced while the run wrote to it; nothing more is written",
            where=str(path),
            fix="Restore it, then run the same command again.",
        )


def disk_error(error: OSError, path: Path, bytes_needed: int = 0) -> ResourceError:
    """Return the error for a failed write: the path, the reason, the bytes needed and free."""
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
    fix = "Free some space, repair the disk or choose another folder, then run the same command again."
    if saved:
        fix = "Earlier checkpoints are intact: free some space or repair the disk, then run the same command again."
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


SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")
"""Files that macOS and Windows add to folders."""


def user_files(folder: Path) -> list[str]:
    """Return the sorted names in a folder, without hidden and system files."""
    return sorted(p.name for p in folder.iterdir() if p.name[0] != "." and p.name not in SYSTEM_FILES)


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/tunesmith`, by default `~/.cache/tunesmith`."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "tunesmith"


def fsync_path(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Faults injected by tests


_counts: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Mark a point for fault tests: TUNESMITH_FAULT=NAME:ACTION:N acts when the point is passed the N-th time.

    ACTION is a signal (kill, term, int), an error (eio, enospc) or sleep.
    """
    wanted = os.environ.get("TUNESMITH_FAULT")
    if not wanted:
        _counts.clear()  # the next fault in this process counts from 1
        return
    point, action, count = [*wanted.split(":"), "1"][:3]
    if point != name:
        return
    _counts[name] = _counts.get(name, 0) + 1
    if _counts[name] != int(count):
        return
    if action == "sleep":
        time.sleep(600)
    elif action in ("eio", "enospc"):
        number = getattr(errno, action.upper())
        raise OSError(number, os.strerror(number))
    else:
        os.kill(os.getpid(), signal.Signals[f"SIG{action.upper()}"])
