"""Spreadsheets (.xlsx, .xls, .ods): the first sheet with rows, every cell as the text a person would type."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError
from tunesmith.reading.containers import DecompressionLimits
from tunesmith.reading.source import LINE_COLUMN
from tunesmith.reading.text_files import Dialect, check_header

_ROWS = 10_000
MOST_BYTES = 2 << 30
"""A sheet that unpacks to more than this is not read into memory."""


def sheet_batches(path: Path, *, origin: str, limits: DecompressionLimits) -> Iterator[Any]:
    """Record batches of strings plus the row numbers of the sheet; the first row holds the column names."""
    import pyarrow as pa

    rows = _read_rows(path, origin)
    if not rows:
        raise DataError("no sheet has rows", where=origin, fix="It needs a header and at least one row.")
    first, header = rows[0]
    names = check_header(
        [name.strip() for name in _trimmed(header)], origin=origin, dialect=Dialect("\t", False, sure=True)
    )
    body = rows[1:]
    if len(names) == 1 and body and len(_trimmed(body[0][1])) > 1:
        fix = f"Delete what is above row {body[0][0]} and save the sheet."
        raise DataError(f"the first row is {names[0]!r}, a title and no header", where=f"{origin}:{first}", fix=fix)
    for number, cells in body:
        if any(cells[len(names) :]):
            fix = f"Name every column in row {first}."
            raise DataError(f"{len(_trimmed(cells))} cells, expected {len(names)}", where=f"{origin}:{number}", fix=fix)
    for start in range(0, len(body), _ROWS):
        part = body[start : start + _ROWS]
        columns = [
            pa.array([cells[k] if k < len(cells) else "" for _, cells in part], pa.string()) for k in range(len(names))
        ]
        yield pa.record_batch([*columns, pa.array([n for n, _ in part], pa.int64())], names=[*names, LINE_COLUMN])


def _read_rows(path: Path, origin: str) -> list[tuple[int, list[str]]]:
    """(row number, cells) of the first sheet that has any, without empty rows."""
    try:
        import python_calamine as calamine
    except ImportError:
        raise DataError(
            "reading spreadsheets needs the package python-calamine",
            where=origin,
            fix="pip install python-calamine, or save the sheet as CSV.",
        ) from None
    _refuse_bomb(path, origin)
    try:
        book = calamine.load_workbook(str(path))
        for name in book.sheet_names:
            sheet = book.get_sheet_by_name(name)
            top = sheet.start[0] + 1 if sheet.start is not None else 1
            rows = [
                (top + k, [_text(cell) for cell in row]) for k, row in enumerate(sheet.to_python(skip_empty_area=True))
            ]
            rows = [(number, cells) for number, cells in rows if any(cells)]
            if rows:
                return rows
    except (calamine.CalamineError, OSError, ValueError) as error:
        problem = f"cannot be read as a spreadsheet ({str(error)[:120]})"
        raise DataError(problem, where=origin, fix="Open and save it again, or save the sheet as CSV.") from None
    return []


def _refuse_bomb(path: Path, origin: str) -> None:
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MOST_BYTES:
        raise DataError(
            f"unpacks to {size:,} bytes, which is too much for a sheet", where=origin, fix="Save it as CSV."
        )


def _text(cell: Any) -> str:
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
