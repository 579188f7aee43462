"""The format of a file, from its name, and what rows come packed in: gzip with a limit on what may come out, Parquet, Arrow files
and streams.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from tunesmith.errors import CheckpointError, DataError, ResourceError, short_text
from tunesmith.files import BadFile, open_plain

CHUNK_BYTES = 1 << 20
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What the system answers for a path that leads to no file: a link to itself, a file taken for a folder, an endless name."""


@dataclass(frozen=True, slots=True)
class DecompressionLimits:
    """How much a compressed file may grow. The ratio counts only once `ratio_free_bytes` have come out."""

    max_decompressed_bytes: int = 64 << 30
    max_ratio: float = 200.0
    ratio_free_bytes: int = 64 << 20


class CountedBytes(io.RawIOBase):
    """A file read once from start to end. Decompresses `.gz` within limits; `sha256` covers the bytes on disk."""

    def __init__(
        self,
        path: Path,
        *,
        origin: str,
        gzipped: bool,
        limits: DecompressionLimits,
        open_file: Callable[[], IO[bytes]] | None = None,
    ) -> None:
        self.origin = origin
        self.limits = limits
        self.size = path.stat().st_size if open_file is None else 0
        self.bytes_out = 0
        self._file = _HashedFile(path.open("rb", buffering=0) if open_file is None else open_file())
        self._stream: IO[bytes] = gzip.GzipFile(fileobj=self._file) if gzipped else self._file  # type: ignore[assignment]
        self._gzipped = gzipped

    @property
    def bytes_in(self) -> int:
        """Bytes read from disk so far."""
        return self._file.count

    @property
    def sha256(self) -> str:
        """Of what was read from disk so far."""
        return self._file.hash.hexdigest()

    def readable(self) -> bool:
        return True

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        try:
            data = self._stream.read(size)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            problem = f"the gzip file is damaged or cut short after {self.bytes_out:,} bytes ({error})"
            raise DataError(problem, where=self.origin, fix="Make the file again, or copy it again.") from None
        except OSError as error:
            raise ResourceError(f"cannot be read ({error.strerror or error})", where=self.origin) from None
        self.bytes_out += len(data)
        if self._gzipped:
            self._check_growth()
        return data

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()

    def _check_growth(self) -> None:
        too_many = self.bytes_out > self.limits.max_decompressed_bytes
        ratio = self.bytes_out / max(self.bytes_in, 1)
        too_dense = self.bytes_out > self.limits.ratio_free_bytes and ratio > self.limits.max_ratio
        if too_many or too_dense:
            limit = f"{self.limits.max_decompressed_bytes:,} bytes" if too_many else f"{self.limits.max_ratio:g} to 1"
            size = f"{self.bytes_out:,} bytes ({ratio:,.0f} to 1)"
            fix = "Decompress the file yourself if you trust it."
            raise DataError(f"decompresses to more than {size}, over the limit of {limit}", where=self.origin, fix=fix)


class _HashedFile(io.RawIOBase):
    """The bytes of the file, hashed and counted as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size) or b""
        self.hash.update(data)
        self.count += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def readable(path: Path, origin: str) -> Iterator[None]:
    """Turns what the operating system says about a file into our errors."""
    try:
        yield
    except FileNotFoundError:
        near = _siblings(path)
        raise DataError("no such file", where=origin, fix=f"Files there: {near}." if near else None) from None
    except IsADirectoryError:
        raise DataError("is a folder, not a file", where=origin) from None
    except PermissionError:
        raise ResourceError("no permission to read it", where=origin, fix="Check the owner and mode.") from None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise DataError(f"cannot be opened ({error.strerror})", where=origin, fix="Give the path of a file.") from None


def _siblings(path: Path) -> str:
    if not path.parent.is_dir() or not os.access(path.parent, os.R_OK | os.X_OK):
        return ""
    return ", ".join(sorted(p.name for p in path.parent.iterdir() if p.suffix == path.suffix)[:5])


def parquet_batches(path: Path, *, origin: str, limits: DecompressionLimits) -> Iterator[Any]:
    """The record batches of a Parquet file, validated, schema metadata kept."""
    import pyarrow.parquet as pq

    with binary_errors("Parquet", origin), pq.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if size > limits.max_decompressed_bytes:
            limit = limits.max_decompressed_bytes
            raise DataError(f"holds {size:,} bytes of rows, over the limit of {limit:,}", where=origin)
        read = 0
        metadata = file.schema_arrow.metadata
        batches = (batch.replace_schema_metadata(metadata) for batch in file.iter_batches(batch_size=16_384))
        for batch in plain_batches(batches, origin):
            read += batch.num_rows
            yield batch
        if read != file.metadata.num_rows:
            raise DataError(f"{read:,} rows read, {file.metadata.num_rows:,} promised by the file", where=origin)


def arrow_batches(path: Path, *, origin: str) -> Iterator[Any]:
    """The record batches of an Arrow IPC file or stream, validated: a hostile offset must not reach compute code."""
    import pyarrow as pa

    with binary_errors("Arrow", origin), pa.OSFile(str(path), "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            _check_stream_end(path, origin)
            batches = iter(pa.ipc.open_stream(file))
        yield from plain_batches(batches, origin)


def plain_batches(batches: Iterable[Any], origin: str) -> Iterator[Any]:
    """Validated batches in plain columns: `outer.inner` for fields of structs, categories as what they stand for (`datasets` has
    no dictionary type), and as text bytes that are UTF-8 in the first batch."""
    import pyarrow as pa

    types: list[Any] = []
    for batch in batches:
        batch.validate(full=True)
        while any(pa.types.is_struct(f.type) for f in batch.schema):
            flat = pa.Table.from_batches([batch]).flatten().replace_schema_metadata(None).combine_chunks()
            batch = flat.to_batches()[0] if flat.num_rows else pa.RecordBatch.from_pylist([], flat.schema)
        types = types or [_plain_type(array) for array in batch.columns]
        arrays = []
        for field, array, kind in zip(batch.schema, batch.columns, types, strict=True):
            try:
                arrays.append(array if array.type == kind else array.cast(kind))
            except pa.ArrowInvalid:
                raise DataError(f"column {field.name!r} holds bytes that are not UTF-8 text", where=origin) from None
        fields = [field.with_type(kind) for field, kind in zip(batch.schema, types, strict=True)]
        yield pa.record_batch(arrays, schema=pa.schema(fields, metadata=batch.schema.metadata))


def _plain_type(array: Any) -> Any:
    import pyarrow as pa

    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        with suppress(pa.ArrowInvalid):
            if array.cast(kind).cast(pa.large_string()).null_count < len(array):
                return pa.large_string() if pa.types.is_large_binary(kind) else pa.string()
    return kind


def _check_stream_end(path: Path, origin: str) -> None:
    # A stream cut between two batches reads as a shorter, complete one. Writers end with a mark and a length of zero.
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        if file.read() != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError("the Arrow stream is cut short: no end mark", where=origin, fix="Write the file again.")


@contextmanager
def binary_errors(kind: str, origin: str) -> Iterator[None]:
    """Turns pyarrow's refusals into one line that names the file."""
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


KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
KINDS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}
KINDS |= dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "sheet")
"""Ending -> format."""


def kind_of_file(path: Path, origin: str, delimiter: str | None) -> tuple[str, bool]:
    """(kind, whether it is gzipped); "lines" where the lines must tell."""
    suffixes = [s.lower() for s in path.suffixes]
    gzipped = bool(suffixes) and suffixes[-1] in (".gz", ".gzip")
    suffix = (suffixes[:-1] if gzipped else suffixes)[-1:] or [""]
    kind = KINDS.get(suffix[0])
    if suffix[0] in (".txt", ".dat", ".ft"):
        kind = "lines" if delimiter is None else "csv"
    elif not suffix[0] and delimiter is not None:
        kind = "csv"
    if kind is None:
        known = "csv, tsv, jsonl, json, txt, xlsx, parquet, arrow, each also as .gz"
        named = "Rename the file, or give --delimiter if its lines are a table."
        fix = {".zip": "Unpack it first, or use gzip.", "": named}.get(suffix[0])
        problem = f"cannot tell the format from the ending {suffix[0]!r}: known are {known}"
        raise DataError(problem, where=origin, fix=fix)
    return kind, gzipped


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
