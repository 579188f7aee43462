"""Rows on disk as Arrow, found again by content: parsed tables and tokens. An entry is a sealed folder that appears by one
rename: whole or absent. A damaged one is made again. And the predictions of a run, which are Parquet.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tunesmith.errors import CheckpointError, DataError, ResourceError, short_text
from tunesmith.files import BadFile, open_plain
from tunesmith.runs.manifest import seal, verify
from tunesmith.runs.writing import create, fsync_path, known_hash

if TYPE_CHECKING:
    from datasets import Dataset


log = logging.getLogger(__name__)
_ROWS = "rows.arrow"
_HASH_ROWS = 10_000


@dataclass(frozen=True)
class CachedRows:
    """An entry: its Arrow stream, and the facts that were stored with it, "rows" among them."""

    file: Path
    facts: dict[str, Any]

    def dataset(self) -> Dataset:
        """The rows, memory-mapped."""
        from datasets import Dataset

        return Dataset.from_file(str(self.file))


@dataclass(frozen=True)
class RowCache:
    """The folder of entries; `key` names one entry."""

    root: Path

    def open(self, key: str) -> CachedRows | None:
        """The entry, its bytes verified, or None. A damaged one is removed, with a line in the log."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        try:
            manifest = verify(folder, hashed=known_hash)
            if manifest["key"] != key:
                raise ValueError("it belongs to other rows")
            return CachedRows(folder / _ROWS, manifest["facts"])
        except Exception as error:  # whatever is wrong with an entry, the rows can be made again
            log.warning("the cached rows in %s cannot be used (%s); they are made again", folder, error)
            self.remove(key)
            return None

    def remove(self, key: str) -> None:
        """Removes an entry, if it exists."""
        shutil.rmtree(self.root / key, ignore_errors=True)

    def build(self, key: str, batches: Iterator[Any], facts: Callable[[], dict[str, Any]] = dict) -> CachedRows | None:
        """Stores the record batches, and the facts that are known after the last of them; None when there is no batch.

        A process killed on the way leaves only a hidden folder that is never read; the next build removes it.
        """
        with self._building(key) as folder:
            rows = _write_stream(folder / _ROWS, batches)
            if rows is None:
                return None
            known = {**facts(), "rows": rows}
            seal(folder, {"kind": "rows", "key": key, "facts": known}, {})
            try:
                os.rename(folder, self.root / key)
            except OSError:
                found = self.open(key)  # another process may have published the same content first: use that
                if found is None:
                    raise
                return found
            fsync_path(self.root)
        return CachedRows(self.root / key / _ROWS, known)

    @contextmanager
    def _building(self, key: str) -> Iterator[Path]:
        build = self.root / f".building-{os.getpid()}-{key}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            shutil.rmtree(build, ignore_errors=True)
            build.mkdir()
            yield build
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "the disk is full" if full else error.strerror or str(error)
            fix = "Free some space or set a different --cache_dir." if full else "Set a different --cache_dir."
            raise ResourceError(
                f"the cache of rows cannot be written ({why})", where=str(self.root), fix=fix
            ) from error
        finally:
            shutil.rmtree(build, ignore_errors=True)

    def _sweep(self) -> None:
        for path in self.root.glob(".building-*"):
            pid = path.name.split("-")[1]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                shutil.rmtree(path, ignore_errors=True)


def _write_stream(path: Path, batches: Iterator[Any]) -> int | None:
    """Writes the batches as an Arrow stream; returns the number of rows, None when there is no batch."""
    import pyarrow as pa

    first = next(batches, None)
    if first is None:
        return None
    rows = 0
    with create(path) as file, pa.ipc.new_stream(pa.PythonFile(file, mode="w"), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def content_hash(dataset: Dataset, columns: tuple[str, ...]) -> str:
    """A hash of the cells of these columns, in order; equal for equal content, however it is stored or chunked."""
    import pyarrow as pa

    digest = hashlib.sha256()
    view = dataset.select_columns(list(columns)).with_format("arrow")
    for table in view.iter(batch_size=_HASH_ROWS):
        whole = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
        digest.update(sink.getvalue())
    digest.update(f"{len(dataset)} {columns}".encode())
    return digest.hexdigest()


@contextmanager
def binary_errors(kind: str, origin: str) -> Iterator[None]:
    """Turns errors of pyarrow into one line that names the file."""
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, NotImplementedError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        reason = " ".join(str(error).split())[:200]
        fix = f"The file is damaged, cut short, or not {kind}: write it again."
        raise DataError(f"cannot be read as {kind} ({reason})", where=origin, fix=fix) from None


MAX_CELLS, MAX_BYTES = 50_000_000, 1_000_000_000
"""Of predictions.parquet: a run keeps at most 200,000 rows of each split."""


def read_prediction_columns(path: str | Path) -> dict[str, list[Any]]:
    """predictions.parquet: name -> values in row order; empty when the file is absent. Damage is a CheckpointError."""
    try:
        with open_plain(path, follow=True) as file:
            return _read_parquet(file)
    except FileNotFoundError:
        return {}
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path), fix="Run `tunesmith predict` again.") from None


def _read_parquet(file: BinaryIO) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.ParquetFile(file)
        cells = found.metadata.num_rows * found.metadata.num_columns
        size = sum(found.metadata.row_group(k).total_byte_size for k in range(found.metadata.num_row_groups))
        if cells > MAX_CELLS or size > MAX_BYTES:
            raise BadFile(f"has {cells:,} cells and {size:,} bytes, more than a run writes")
        table = found.read()
        if len(set(table.column_names)) < len(table.column_names):
            raise BadFile("has two columns of one name")
        return {str(name): table.column(name).to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise error if isinstance(error, BadFile) else BadFile(f"is not a parquet file ({short_text(error)})") from None
