"""Rows that come packed: Parquet, Arrow files and streams, spreadsheets (.xlsx, .xls, .ods; every cell as the text a person would
type).
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from tunesmith.data.blocks import DecompressionLimits
from tunesmith.data.ready_commands import train_with
from tunesmith.data.row_cache import binary_errors
from tunesmith.data.source import LINE_COLUMN
from tunesmith.data.text_files import Dialect, check_header
from tunesmith.errors import DataError, did_you_mean

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


def sheet_batches(path: Path, *, origin: str, sheet: str | None = None) -> Iterator[Any]:
    """Record batches of strings plus the row numbers of the sheet; the first row holds the column names."""
    import pyarrow as pa

    rows = _read_rows(path, origin, sheet)
    if not rows:
        raise DataError("no sheet has rows", where=origin, fix="It needs a header and at least one row.")
    first, header = rows[0]
    stripped = [name.strip() for name in _trimmed(header)]
    names = check_header(stripped, origin=origin, dialect=Dialect("\t", False, sure=True))
    body = rows[1:]
    if len(names) == 1 and body and len(_trimmed(body[0][1])) > 1:
        fix = f"Delete what is above row {body[0][0]} and save the sheet."
        raise DataError(f"the first row is {names[0]!r}, a title, not a header", where=f"{origin}:{first}", fix=fix)
    for number, cells in body:
        if any(cells[len(names) :]):
            fix = f"Name every column in row {first}."
            raise DataError(f"{len(_trimmed(cells))} cells, expected {len(names)}", where=f"{origin}:{number}", fix=fix)
    for start in range(0, len(body), SHEET_ROWS):
        part = body[start : start + SHEET_ROWS]
        full = [cells[: len(names)] + [""] * (len(names) - len(cells)) for _, cells in part]
        columns = [pa.array(column, pa.string()) for column in zip(*full, strict=True)]
        yield pa.record_batch([*columns, pa.array([n for n, _ in part], pa.int64())], names=[*names, LINE_COLUMN])


def _read_rows(path: Path, origin: str, asked: str | None) -> list[tuple[int, list[str]]]:
    """(row number, cells) of the one sheet with a table, or of the one asked for, without empty rows."""
    sheets = _open_sheets(path, origin)
    name = _choose_sheet(sheets, origin, asked)
    rows = sheets[name].to_python(skip_empty_area=True) if name is not None else []
    top = sheets[name].start[0] + 1 if name is not None and sheets[name].start is not None else 1
    numbered = [(top + k, [_as_typed(cell) for cell in row]) for k, row in enumerate(rows)]
    return [(number, cells) for number, cells in numbered if any(cells)]


def note_sheet(path: Path, origin: str, asked: str | None) -> str | None:
    """A sentence if the workbook has other sheets that are not read."""
    sheets = _open_sheets(path, origin)
    name = _choose_sheet(sheets, origin, asked)
    others = ", ".join(map(repr, [other for other in sheets if other != name][:6]))
    return f"Reading: sheet {name!r} of {origin}; not read: {others}." if others else None


def _choose_sheet(sheets: dict[str, Any], origin: str, asked: str | None) -> str | None:
    """The sheet to read. If several sheets hold tables, an error asks which one."""
    if asked is not None and asked not in sheets:
        fix = did_you_mean(asked, tuple(sheets)) or f"Sheets with rows: {', '.join(map(repr, sheets))}."
        raise DataError(f"there is no sheet {asked!r} with rows", where=origin, fix=fix)
    tables = [name for name, sheet in sheets.items() if sheet.width > 1 and sheet.height > 1]
    if asked is None and len(tables) > 1:
        tables.sort(key=lambda name: -sheets[name].height)
        shown = ", ".join(f"{name!r} ({sheets[name].height - 1:,} rows)" for name in tables[:8])
        command = train_with(origin, f"--sheet_name {shlex.quote(tables[0])}")
        raise DataError(f"which sheet? {shown}", where=origin, fix=f"Answer for example with: {command}")
    return asked if asked is not None else next(iter([*tables, *sheets]), None)


def _open_sheets(path: Path, origin: str) -> dict[str, Any]:
    """The sheets that have cells, in order."""
    try:
        import python_calamine as calamine
    except ImportError:
        fix = "pip install python-calamine, or save the sheet as CSV."
        raise DataError("reading spreadsheets needs the package python-calamine", where=origin, fix=fix) from None
    _refuse_bomb(path, origin)
    try:
        book = calamine.load_workbook(str(path))
        found = {name: book.get_sheet_by_name(name) for name in book.sheet_names}
    except (calamine.CalamineError, OSError, ValueError) as error:
        problem = f"cannot be read as a spreadsheet ({str(error)[:120]})"
        raise DataError(problem, where=origin, fix="Open and save it again, or save the sheet as CSV.") from None
    return {name: sheet for name, sheet in found.items() if sheet.height}


def _refuse_bomb(path: Path, origin: str) -> None:
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MOST_SHEET_BYTES:
        problem = f"unpacks to {size:,} bytes, which is too much for a sheet"
        raise DataError(problem, where=origin, fix="Save it as CSV.")


def _as_typed(cell: Any) -> str:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    if isinstance(cell, (datetime, date, time)):
        return cell.isoformat()
    return "" if cell is None else str(cell)


def _trimmed(cells: list[str]) -> list[str]:
    last = max((k for k, cell in enumerate(cells) if cell), default=-1)
    return cells[: last + 1]
