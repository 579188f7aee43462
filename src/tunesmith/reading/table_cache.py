"""Tables on disk, made once for each content: written to a temporary file, renamed when complete, memory-mapped after.

The name of a table holds its rows, its size and a mark of its bytes: a damaged one is made again, and one of another size is
not read for that.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import ResourceError
from tunesmith.run.remembered import known_hash, own_cache
from tunesmith.run.writing import create

log = logging.getLogger(__name__)
_STALE_SECONDS = 24 * 3600


def default_table_cache() -> Path:
    """Where tables go without --cache_dir."""
    return own_cache() / "tables"


def find_table(key: str, cache_dir: Path) -> tuple[Path, int] | None:
    """The finished table for `key` and its rows, its bytes verified; a damaged one is removed, with a line in the log."""
    for path in sorted(cache_dir.glob(f"{key}.*.arrow")):
        _, rows, *rest, _ = path.name.split(".")
        try:
            # neither a pipe nor a file of another size is opened: reading it could take forever
            whole = path.is_file() and rows.isdigit() and rest[:1] == [str(path.stat().st_size)]
            if whole and rest[1:] == [_mark(key, rows, known_hash(path))]:
                return path, int(rows)
            log.warning("the cached table %s is damaged; it is made again", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _explain(error, cache_dir) from None
    return None


def cache_table(key: str, cache_dir: Path, batches: Iterator[Any]) -> tuple[Path | None, int]:
    """Writes the batches under `key`; gives back the file and its rows, or (None, 0) when there is no row."""
    import pyarrow as pa

    rows = 0
    part: Path | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        first = next(batches, None)
        if first is None:
            return None, 0
        part = cache_dir / f".{key[:16]}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        with create(part) as file:
            hashing = _HashingWriter(file)
            with pa.ipc.new_stream(pa.PythonFile(hashing, mode="w"), first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
                    rows += batch.num_rows
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        mark = _mark(key, str(rows), hashing.digest.hexdigest())
        done = cache_dir / f"{key}.{rows}.{size}.{mark}.arrow"
        part.replace(done)
        return done, rows
    except OSError as error:
        raise _explain(error, cache_dir) from None
    finally:
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _mark(key: str, rows: str, digest: str) -> str:
    """The part of a table's name that comes from its bytes and from the content they belong to."""
    return hashlib.sha256(f"{key} {rows} {digest}".encode()).hexdigest()[:32]


class _HashingWriter:
    """A file to write to that hashes what it is given: the bytes as they were meant, whatever the disk makes of them."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _sweep(cache_dir: Path) -> None:
    """Removes what a killed process left a day ago or more."""
    limit = time.time() - _STALE_SECONDS
    for path in cache_dir.glob(".*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime < limit:
                path.unlink()


def _explain(error: OSError, cache_dir: Path) -> ResourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stats = os.statvfs(cache_dir)
        free = stats.f_bavail * stats.f_frsize
        fix = "Free some space or give another --cache_dir."
        return ResourceError(f"the disk is full ({free:,} bytes free)", where=str(cache_dir), fix=fix)
    problem = f"the data cache cannot be used ({error.strerror or error})"
    return ResourceError(problem, where=str(cache_dir), fix="Give another --cache_dir.")
