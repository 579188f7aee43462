"""Spreadsheets (.xlsx, .xls, .ods): every cell becomes the text a person would type.

The reader expands a sheet to a dense table: one cell in a far corner, a damaged reference or a zip bomb can exhaust the memory or
abort the process. It therefore runs in a separate process with limits on memory and time; this one gets a table or an error.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, time
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from tunesmith.data.csv_files import Dialect, check_header
from tunesmith.data.files import DecompressionLimits
from tunesmith.data.source import LINE_COLUMN
from tunesmith.errors import DataError, did_you_mean

SHEET_ROWS = 10_000
MOST_MEMORY = 4 << 30
MOST_SECONDS = 120
MOST_ZIP_BYTES = 2 << 30
_READER = "import sys; sys.path.append(sys.argv[1]); from tunesmith.data.spreadsheets import work; work()"
_SAVE = "Open and save it again, or save the sheet as CSV."


class Sheet(NamedTuple):
    """A sheet that has cells."""

    name: str
    width: int
    height: int


def sheet_batches(path: Path, *, origin: str, sheet: str | None, facts: dict[str, Any]) -> Iterator[Any]:
    """Yield record batches of strings plus the row numbers of the sheet; the first row contains the column names.

    `facts` receives the name of the sheet, and the other sheets, which are not read.
    """
    import pyarrow as pa

    _refuse_bomb(path, origin)
    rows = _read_rows(path, origin, sheet, facts)
    first, header = next(rows, (0, []))
    if not header:
        raise DataError("no sheet has rows", where=origin, fix="It needs a header and at least one row.")
    stripped = [name.strip() for name in _trimmed(header)]
    names = check_header(stripped, origin=origin, dialect=Dialect("\t", False, sure=True))
    second = next(rows, None)
    if second is not None and len(names) == 1 and len(_trimmed(second[1])) > 1:
        fix = f"Delete the rows above row {second[0]} and save the sheet."
        raise DataError(f"the first row is {names[0]!r}, a title, not a header", where=f"{origin}:{first}", fix=fix)
    rows = chain([second] if second is not None else [], rows)
    while some := list(islice(rows, SHEET_ROWS)):
        for number, cells in some:
            if any(cells[len(names) :]):
                problem = f"{len(_trimmed(cells))} cells, expected {len(names)}"
                raise DataError(problem, where=f"{origin}:{number}", fix=f"Name every column in row {first}.")
        full = [cells[: len(names)] + [""] * (len(names) - len(cells)) for _, cells in some]
        columns = [pa.array(column, pa.string()) for column in zip(*full, strict=True)]
        yield pa.record_batch([*columns, pa.array([n for n, _ in some], pa.int64())], names=[*names, LINE_COLUMN])


def _read_rows(path: Path, origin: str, asked: str | None, facts: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield (row number, cells) of the one sheet with a table, or of the requested one, without empty rows."""
    command = [sys.executable, "-c", _READER, str(Path(__file__).resolve().parents[2]), str(path), asked or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            head = json.loads(process.stdout.readline() or "{}")
            if "missing" in head:
                fix = "pip install python-calamine, or save the sheet as CSV."
                raise DataError("reading spreadsheets needs the package python-calamine", where=origin, fix=fix)
            if "error" in head:
                raise DataError(f"cannot be read as a spreadsheet ({head['error']})", where=origin, fix=_SAVE)
            if "sheets" in head:
                sheets = [Sheet(*sheet) for sheet in head["sheets"]]
                name = choose_sheet(sheets, origin, asked)
                facts |= {"sheet": name, "other_sheets": [repr(s.name) for s in sheets[:7] if s.name != name]}
                for line in process.stdout:
                    yield tuple(json.loads(line))
            if process.wait() != 0:
                problem = "cannot be read as a spreadsheet: the reader ran out of memory or time, or crashed"
                fix = "Delete cells far outside of the table, or save the sheet as CSV."
                raise DataError(problem, where=origin, fix=fix)
        finally:
            process.kill()


def choose_sheet(sheets: list[Sheet], origin: str, asked: str | None) -> str | None:
    """Return the sheet to read. If several sheets contain tables, an error asks which one."""
    names = [sheet.name for sheet in sheets]
    if asked is not None and asked not in names:
        fix = did_you_mean(asked, names) or f"Sheets with rows: {', '.join(map(repr, names))}."
        raise DataError(f"there is no sheet {asked!r} with rows", where=origin, fix=fix)
    tables = sorted((s for s in sheets if s.width > 1 and s.height > 1), key=lambda s: -s.height)
    if asked is None and len(tables) > 1:
        shown = ", ".join(f"{s.name!r} ({s.height - 1:,} rows)" for s in tables[:8])
        fix = f"Set for example --sheet_name {shlex.quote(tables[0].name)}."
        raise DataError(f"which sheet? {shown}", where=origin, fix=fix)
    return asked if asked is not None else next((s.name for s in (*tables, *sheets)), None)


def work() -> None:
    """Run the reader process: print the sheets as one line of JSON, then one line per row of the chosen sheet."""
    with suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    path, asked = sys.argv[2], sys.argv[3] or None
    try:
        import python_calamine as calamine
    except ImportError:
        _say({"missing": True})
        return
    try:
        book = calamine.load_workbook(path)
        found = {name: sheet for name in book.sheet_names if (sheet := book.get_sheet_by_name(name)).height}
    except (calamine.CalamineError, OSError, ValueError) as error:
        _say({"error": " ".join(str(error).split())[:120]})
        return
    sheets = [Sheet(name, sheet.width, sheet.height) for name, sheet in found.items()]
    _say({"sheets": sheets})
    try:
        name = choose_sheet(sheets, path, asked)
    except DataError:  # the other process raises it
        return
    for number, row in enumerate(found[name].iter_rows() if name is not None else (), start=1):
        cells = _trimmed([_as_typed(cell) for cell in row])
        if cells:
            _say([number, cells])


def _say(value: Any) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")


def _refuse_bomb(path: Path, origin: str) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"cannot be read as a spreadsheet ({error})", where=origin, fix=_SAVE) from None
    limits = DecompressionLimits()
    dense = size > limits.ratio_free_bytes and size > limits.max_ratio * path.stat().st_size
    if dense or size > MOST_ZIP_BYTES:
        raise DataError(
            f"unpacks to {size:,} bytes, which is too much for a sheet", where=origin, fix="Save it as CSV."
        )


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
