"""Tokenized rows on disk, found again by content. An entry is a sealed folder that appears by one rename: whole or absent."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ResourceError
from tunesmith.run.remembered import known_hash, own_cache
from tunesmith.run.sealed import seal, verify
from tunesmith.run.writing import fsync_path

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
_HASH_ROWS = 10_000
_RELEASE_EVERY = 20
"""Batches: often enough that a large file is never in memory as a whole, seldom enough to cost nothing."""


def default_token_cache() -> Path:
    """Where tokens go without --cache_dir."""
    return own_cache() / "tokens"


def content_hash(dataset: Dataset, columns: tuple[str, ...]) -> str:
    """A hash of the cells of these columns, in order; equal for equal content, however it is stored or chunked."""
    import pyarrow as pa

    digest = hashlib.sha256()
    view = dataset.select_columns(list(columns)).with_format("arrow")
    for number, table in enumerate(view.iter(batch_size=_HASH_ROWS), start=1):
        whole = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
        digest.update(sink.getvalue())
        if number % _RELEASE_EVERY == 0:
            release_pages(dataset)
    digest.update(f"{len(dataset)} {columns}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenCache:
    """The folder of entries; `key` names one entry."""

    root: Path

    def open(self, key: str) -> tuple[Dataset, dict[str, Any]] | None:
        """The stored rows and facts, or None. A damaged entry is removed, with a word in the log."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        try:
            return _read_entry(folder)
        except Exception as error:  # whatever is wrong with an entry, the rows can be made again
            log.warning("tokenized rows in %s cannot be used (%s); they are made again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None

    def remove(self, key: str) -> None:
        """Forget one entry, if it is there."""
        shutil.rmtree(self.root / key, ignore_errors=True)

    def build(
        self, key: str, write: Callable[[Path], None], count: Callable[[list[Path]], dict[str, Any]]
    ) -> tuple[Dataset, dict[str, Any]]:
        """`write` puts Arrow files into a hidden folder, which is published with the facts of `count`; the result of `open`.

        A process killed on the way leaves only a hidden folder that is never read; the next build removes old ones.
        """
        with self._building_folder(key) as build:
            write(build)
            files = sorted(p for p in build.iterdir() if p.suffix == ".arrow")
            facts = {**count(files), "rows": len(_read_files(files))}
            seal(build, {"kind": "tokens", "key": key, "facts": facts}, {})
            try:
                os.rename(build, self.root / key)
            except OSError:
                if not (self.root / key).is_dir():
                    raise
                found = self.open(key)  # another process published the same content first: use that
                if found is None:
                    problem = "the tokenized rows vanished while they were written"
                    raise ResourceError(problem, where=str(self.root / key)) from None
                return found
            fsync_path(self.root)
        return _read_files([self.root / key / path.name for path in files]), facts

    @contextmanager
    def _building_folder(self, key: str) -> Iterator[Path]:
        build = self.root / f".building-{os.getpid()}-{key}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            shutil.rmtree(build, ignore_errors=True)
            build.mkdir()
            yield build
        except OSError as error:
            problem = f"cannot write the tokenized rows ({error.strerror or error})"
            fix = "Free some space or choose another folder for the cache."
            raise ResourceError(problem, where=str(self.root), fix=fix) from error
        finally:
            shutil.rmtree(build, ignore_errors=True)

    def _sweep(self) -> None:
        for path in self.root.glob(".building-*"):
            pid = path.name.split("-")[1]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                shutil.rmtree(path, ignore_errors=True)


def _read_entry(folder: Path) -> tuple[Dataset, dict[str, Any]]:
    manifest = verify(folder, hashed=known_hash)
    if manifest["key"] != folder.name:
        raise ValueError("it belongs to other rows")
    facts: dict[str, Any] = manifest["facts"]
    dataset = _read_files([folder / name for name in sorted(manifest["files"])])
    if len(dataset) != facts["rows"]:
        raise ValueError(f"{len(dataset)} rows, not {facts['rows']}")
    return dataset, facts


def _read_files(files: list[Path]) -> Dataset:
    from datasets import Dataset, concatenate_datasets

    parts = [Dataset.from_file(str(path)) for path in files]
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


_MAPS = Path("/proc/self/maps")


def release_pages(dataset: Dataset) -> int:
    """Gives the pages of the dataset's files back to the system; returns the number of bytes of those mappings.

    Nothing is lost: the mappings are read-only views of files, and a page that is needed again is read again (from
    the page cache, as a rule). Where the system has no /proc, nothing happens.
    """
    files = {str(Path(entry["filename"]).resolve()) for entry in dataset.cache_files}
    if not files or not _MAPS.exists():
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released = 0
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0] in files and "w" not in rights:  # a private page that was written would be lost
            start, end = (int(address, 16) for address in span.split("-"))
            if advise(start, end - start, mmap.MADV_DONTNEED) == 0:
                released += end - start
    return released
