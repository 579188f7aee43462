"""Parquet files, Arrow files and streams: validated, in plain columns, within limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunesmith.data.cache import binary_errors
from tunesmith.data.files import DecompressionLimits
from tunesmith.errors import DataError


def parquet_batches(path: Path, *, origin: str, limits: DecompressionLimits) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, with the schema metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with binary_errors("Parquet", origin):
        schema = pq.read_schema(path)
        # Kept as dictionaries until their size is known: one text of a few hundred KB, repeated, fills the memory.
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            check_growth(size, path.stat().st_size, limits, origin)
            batches = (b.replace_schema_metadata(schema.metadata) for b in file.iter_batches(batch_size=16_384))
            yield from plain_batches(batches, origin, limits, path.stat().st_size)


def arrow_batches(path: Path, *, origin: str, limits: DecompressionLimits) -> Iterator[Any]:
    """Yield the record batches of an Arrow IPC file or stream; a hostile offset must not reach compute code."""
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
        yield from plain_batches(batches, origin, limits, path.stat().st_size)


def plain_batches(
    batches: Iterable[Any], origin: str, limits: DecompressionLimits | None = None, size: int = 0
) -> Iterator[Any]:
    """Yield validated batches in plain columns: `outer.inner` for fields of structs, values instead of dictionaries, and text for
    bytes that are UTF-8 in the first batch. With `limits`, decoded dictionaries may not grow far beyond `size` bytes.
    """
    import pyarrow as pa

    types: list[Any] = []
    decoded = 0
    for batch in batches:
        batch.validate(full=True)
        while any(pa.types.is_struct(f.type) for f in batch.schema):
            flat = pa.Table.from_batches([batch]).flatten().replace_schema_metadata(None).combine_chunks()
            batch = flat.to_batches()[0] if flat.num_rows else pa.RecordBatch.from_pylist([], flat.schema)
        if limits is not None:
            decoded += sum(map(_decoded_bytes, batch.columns))
            check_growth(decoded, size, limits, origin)
        types = types or [_plain_type(array) for array in batch.columns]
        arrays = []
        for field, array, kind in zip(batch.schema, batch.columns, types, strict=True):
            try:
                arrays.append(array if array.type == kind else array.cast(kind))
            except pa.ArrowInvalid:
                raise DataError(f"column {field.name!r} contains bytes that are not UTF-8 text", where=origin) from None
        fields = [field.with_type(kind) for field, kind in zip(batch.schema, types, strict=True)]
        yield pa.record_batch(arrays, schema=pa.schema(fields, metadata=batch.schema.metadata))


def check_growth(unpacked: int, size: int, limits: DecompressionLimits, origin: str) -> None:
    """Refuse a file that unpacks to more than the limits allow."""
    dense = unpacked > limits.ratio_free_bytes and unpacked > limits.max_ratio * size
    if dense or unpacked > limits.max_decompressed_bytes:
        problem = f"unpacks to more than {unpacked:,} bytes from {size:,}, over the limit"
        raise DataError(problem, where=origin, fix="If you trust the file, write its rows as JSON lines.")


def _decoded_bytes(array: Any) -> int:
    """Return the size of a dictionary array as plain values; 0 for other arrays."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(array.type):
        return 0
    values = array.dictionary
    if not (pa.types.is_string(values.type) or pa.types.is_binary(values.type) or "large" in str(values.type)):
        return 0
    lengths = pc.binary_length(values).cast(pa.int64())
    return pc.sum(lengths.take(array.indices)).as_py() or 0


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
