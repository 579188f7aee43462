"""Rows that come packed: Parquet, Arrow files and streams, spreadsheets (.xlsx, .xls, .ods; every cell as the text a person would
type).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunesmith.data.cache import binary_errors
from tunesmith.data.files import DecompressionLimits
from tunesmith.errors import DataError

SHEET_ROWS = 10_000
MOST_SHEET_BYTES = 2 << 30
"""A workbook that unpacks to more than this is not read into memory."""


def parquet_batches(path: Path, *, origin: str, limits: DecompressionLimits) -> Iterator[Any]:
    """The record batches of a Parquet file, validated, schema metadata kept."""
    import pyarrow.parquet as pq

    with binary_errors("Parquet", origin), pq.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if size > limits.max_decompressed_bytes:
            limit = limits.max_decompressed_bytes
            raise DataError(f"holds {size:,} bytes of rows, over the limit of {limit:,}", where=origin)
        metadata = file.schema_arrow.metadata
        batches = (batch.replace_schema_metadata(metadata) for batch in file.iter_batches(batch_size=16_384))
        yield from plain_batches(batches, origin)


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
