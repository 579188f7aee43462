"""Rows that come packed: Parquet, Arrow files and streams, spreadsheets (.xlsx, .xls, .ods; every cell as the text a person would
type).
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from tunesmith.data.csv_files import Dialect, check_header
from tunesmith.data.ready_commands import train_with
from tunesmith.data.source import LINE_COLUMN
from tunesmith.errors import DataError, did_you_mean

SHEET_ROWS = 10_000
MOST_SHEET_BYTES = 2 << 30
"""A workbook that unpacks to more than this is not read into memory."""


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
