"""Text files: bytes, then text, then lines, then records of delimited text, with the exact place of every error.

Bytes: gzip within limits. Text: a byte order mark decides the encoding (UTF-8, UTF-16, UTF-32); without one it is UTF-8 unless an
encoding is set. Bytes that do not decode are refused, never replaced; the error names a likely encoding for the user to confirm.
NUL is refused: it is the mark of UTF-16 or of a damaged file. Records: quotes as in RFC 4180, or none. pyarrow is not needed.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tunesmith.config.load import check_encoding
from tunesmith.config.options import DELIMITER_WORDS, Reading
from tunesmith.data.rows import BAD_COLUMN, LINE_COLUMN
from tunesmith.errors import ConfigError, DataError, ResourceError

_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path that can't be a file: a link to itself, a file used as a folder, a name that is too long."""
KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
}
KINDS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
KINDS |= dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "sheet")
"""Ending -> format."""
OnProgress = Callable[[int, int], None]


# --- files ------------------------------------------------------------------------------------------------------------


def kind_of_file(path: Path, origin: str, delimiter: str | None) -> tuple[str, bool]:
    """Return (kind, whether it is gzipped)."""
    suffixes = [s.lower() for s in path.suffixes]
    gzipped = bool(suffixes) and suffixes[-1] in (".gz", ".gzip")
    suffix = (suffixes[:-1] if gzipped else suffixes)[-1:] or [""]
    kind = KINDS.get(suffix[0])
    if kind is None and delimiter is not None and suffix[0] in ("", ".dat"):
        kind = "csv"
    if kind is None:
        known = "csv, tsv, jsonl, json, txt (each also as .gz), xlsx, parquet and arrow"
        named = "Rename the file, or set --delimiter if its lines are a table."
        fix = {".zip": "Unpack it first, or use gzip.", "": named}.get(suffix[0], "Save the table as CSV.")
        problem = f"cannot tell the format from the ending {suffix[0]!r}: known are {known}"
        raise DataError(problem, where=origin, fix=fix)
    if gzipped and kind in ("parquet", "arrow", "sheet"):
        raise DataError("is compressed with gzip, which is read only for text files", where=origin, fix="Run gunzip.")
    return kind, gzipped


_OTHER_CONTENT = (
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data", "Run `git lfs pull`."),
    (b"<!doctype html", "is a web page, not a table", "Download the data file itself, or save the page as CSV."),
    (b"<html", "is a web page, not a table", "Download the data file itself, or save the page as CSV."),
    (b"pk\x03\x04", "is a spreadsheet or a zip archive", "Rename a spreadsheet to .xlsx; unpack an archive."),
    (b"\x1f\x8b", "is compressed with gzip", "Add .gz to its name."),
    (b"par1", "is a Parquet file", "Rename it to .parquet."),
)
"""Start of files whose name is misleading -> the problem, and what to do."""


def refuse_other_content(path: Path, kind: str, origin: str, *, gzipped: bool) -> None:
    """Refuse a pipe, a file without content, and a web page, an archive or a Git LFS pointer that is named like a table."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is a pipe or a device, not a file", where=origin, fix="Write the rows to a file first.")
    with path.open("rb") as file:
        head = file.read(1 << 20)
    if not head:
        raise DataError("the file is empty (0 bytes)", where=origin, fix="It needs at least one row.")
    if found.st_size > 10**8 and not any(head):  # an incomplete copy, not a line of text
        raise DataError("begins with a million zero bytes", where=origin, fix="Copy the file again.")
    start = head[:100].lstrip(b"\xef\xbb\xbf \r\n\t").lower()
    own = {"sheet": (b"pk",), "parquet": (b"par1",)}.get(kind, ()) + ((b"\x1f\x8b",) if gzipped else ())
    for mark, problem, fix in _OTHER_CONTENT:
        if start.startswith(mark) and not mark.startswith(own or (b"\0",)):
            raise DataError(problem, where=origin, fix=fix)


MAX_UNPACKED_BYTES = 64 << 30
MAX_RATIO = 200.0
RATIO_FREE_BYTES = 64 << 20
"""The ratio of a compressed file is checked above this many unpacked bytes."""


def check_growth(unpacked: int, size: int, origin: str, most: int = sys.maxsize) -> None:
    """Refuse a file of `size` bytes that unpacks to more than the limits allow."""
    dense = unpacked > RATIO_FREE_BYTES and unpacked > MAX_RATIO * size
    if dense or unpacked > min(most, MAX_UNPACKED_BYTES):
        problem = f"unpacks to {unpacked:,} bytes from {size:,}, over the limit"
        raise DataError(problem, where=origin, fix="If you trust the file, write its rows as JSON lines or CSV.")


def open_bytes(path: Path, *, gzipped: bool) -> Any:
    """Open a file for `text_lines`."""
    return gzip.open(path) if gzipped else path.open("rb")


@contextmanager
def readable(path: Path, origin: str) -> Iterator[None]:
    """Turn errors of the operating system and of gzip about a file into errors of this package."""
    try:
        yield
    except FileNotFoundError:
        folder, near = path.parent, ""
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
            near = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix == path.suffix)[:5])
        raise DataError(
            "no such file", where=origin, fix=f"Files there: {near}." if near else "Check the path."
        ) from None
    except IsADirectoryError:
        raise DataError("is a folder, not a file", where=origin, fix="Pass the path of a file.") from None
    except PermissionError:
        raise ResourceError("no permission to read it", where=origin, fix="Check the owner and mode.") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        problem = f"the gzip file is damaged or truncated ({error})"
        raise DataError(problem, where=origin, fix="Make the file again, or copy it again.") from None
    except OSError as error:
        if error.errno in _NO_FILE:
            problem, fix = f"cannot be opened ({error.strerror})", "Pass the path of a file."
            raise DataError(problem, where=origin, fix=fix) from None
        problem, fix = f"cannot be read ({error.strerror or error})", "Check the disk, then run the same command again."
        raise ResourceError(problem, where=origin, fix=fix) from None


# --- text -------------------------------------------------------------------------------------------------------------

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark starts with the UTF-16 one
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WITHOUT_MARK = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
MAX_RECORD_CHARS = 16 << 20
"""Longer lines and records are reported as an unclosed quote or a file without lines, so that memory use is limited."""
MAX_ARRAY_CHARS = 256 << 20
"""The largest .json file that is not JSON lines; it is read whole."""


REPORT_CHARS = 1 << 20


def text_lines(
    raw: Any,
    origin: str,
    *,
    encoding: str | None,
    longest: int = MAX_RECORD_CHARS,
    dialect: Dialect | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[str]:
    """Yield the lines of a binary stream with their ends (LF, CRLF or CR).

    Bytes that are not text and lines of more than `longest` characters are errors with their line and field.
    `on_progress(bytes_done, bytes_total)` is called for every million characters of a file, and at its end.
    """
    codec, skip = choose_codec(raw.read(4), encoding, origin)
    raw.seek(skip)
    text = io.TextIOWrapper(raw, codec, newline="")
    number = seen = 0
    try:
        while line := text.readline(longest + 1):
            number += 1
            if "\0" in line:
                where = f"{origin}:{number}{_field_at(line, line.index(chr(0)), dialect)}"
                fix = "Remove it; the file may be damaged."
                if line.count("\0") * 3 > len(line):
                    codec = "utf-16-be" if line.startswith("\0") else "utf-16-le"
                    fix = f"It looks like UTF-16 without a byte order mark: set --encoding {codec}."
                raise DataError("a NUL character", where=where, fix=fix)
            if len(line) > longest:
                problem = f"a line of more than {longest >> 20} million characters"
                fix = "Is this a text file with one record per line?"
                raise DataError(problem, where=f"{origin}:{number}", fix=fix)
            seen += len(line)
            if seen > REPORT_CHARS:
                seen, done = 0, getattr(raw, "fileobj", raw).tell()
                if isinstance(raw, gzip.GzipFile):
                    check_growth(raw.tell(), done, origin)
                if on_progress is not None:
                    on_progress(done, os.fstat(raw.fileno()).st_size)
            yield line
        if on_progress is not None:
            on_progress(*[os.fstat(raw.fileno()).st_size] * 2)
    except UnicodeDecodeError as error:
        offset = raw.tell() - len(error.object) + error.start
        before = io.StringIO(error.object[: error.start].decode(codec, "replace") + "?", newline="").readlines()
        # The beginning of the line is unknown if it was read before.
        is_whole = len(before) > 1 or offset == skip + error.start
        rest = error.object[error.start :].decode(codec, "replace").partition("\n")[0]
        column = _field_at(before[-1] + rest, len(before[-1]) - 1, dialect) if is_whole else ""
        problem, fix = _describe(error, offset, codec)
        raise DataError(problem, where=f"{origin}:{number + len(before)}{column}", fix=fix) from None
    finally:
        if not raw.closed:
            text.detach()  # the caller closes the file


def _field_at(line: str, at: int, dialect: Dialect | None) -> str:
    """Return `:3` for a character in the third field of a line, or the third character of JSON; nothing without fields."""
    if dialect is None:
        return f":{at + 1}"
    if dialect.delimiter not in line:
        return ""
    quoting: Any = csv.QUOTE_MINIMAL if dialect.quoting else csv.QUOTE_NONE
    fields = next(csv.reader([line[:at].replace("\0", "") + "?"], delimiter=dialect.delimiter, quoting=quoting))
    return f":{len(fields)}"


def choose_codec(head: bytes, encoding: str | None, origin: str) -> tuple[str, int]:
    asked = check_encoding(encoding)
    for mark, codec in _MARKS:
        if head.startswith(mark):
            if asked is not None and not codec.startswith(_WITHOUT_MARK.get(asked, asked).rsplit("-", 1)[0]):
                problem = f"starts with a byte order mark of {codec}, but --encoding is {encoding}"
                raise DataError(problem, where=origin, fix="Omit --encoding.")
            return codec, len(mark)
    if asked is None:
        return "utf-8", 0
    return _WITHOUT_MARK.get(asked, asked), 0


def _describe(error: UnicodeDecodeError, start: int, codec: str) -> tuple[str, str]:
    """Return the problem and what to do."""
    bad = error.object[error.start : error.start + 1]
    if error.start + 4 > len(error.object) and error.reason in ("unexpected end of data", "truncated data"):
        problem = f"the file ends inside a character (byte offset {start}, 0x{bad.hex()}): it is truncated"
        return problem, "Copy the file again."
    problem = f"byte 0x{bad.hex()} at byte offset {start} is not {codec} ({error.reason})"
    if codec != "utf-8":
        return problem, "Set the right --encoding."
    return problem, "Save the file as UTF-8, or set its encoding, such as --encoding cp1252 for Western European files."


# --- delimiters and header ---------------------------------------------------------------------------------------------

DELIMITER_NAMES = {";": "semicolon", "\t": "tab", "|": "pipe", ",": "comma"}
SNIFFED_LINES = 20
"""Number of first lines that show the delimiter of a file."""
SHOWN = 10
"""Number of bad rows to show; all are counted."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How cells are separated. `sure`: the user set the delimiter."""

    delimiter: str
    quoting: bool
    sure: bool

    def join(self, fields: Sequence[str]) -> str:
        """Return the text of a record."""
        out = io.StringIO()
        csv.writer(out, delimiter=self.delimiter, lineterminator="").writerow(fields)
        return out.getvalue() if self.quoting else self.delimiter.join(fields)


def choose_dialect(kind: str, reading: Reading) -> Dialect:
    """Return the dialect. CSV: comma and RFC 4180 quotes; TSV: tab and no quotes, as in GLUE. Options take precedence."""
    delimiter, quoting = reading.delimiter, reading.quoting
    if quoting not in (None, "minimal", "none"):
        raise ConfigError(f"--quoting {quoting!r} is not known", fix="Use minimal or none.")
    quoted = kind == "csv" if quoting is None else quoting == "minimal"
    if delimiter is None:
        return Dialect("\t" if kind == "tsv" else ",", quoted, sure=False)
    character = DELIMITER_WORDS.get(delimiter.lower(), delimiter)
    if len(character) != 1 or character in '"\r\n\0':
        fix = "Use one character, or tab, comma, semicolon, pipe, space."
        raise ConfigError(f"--delimiter {delimiter!r} cannot separate fields", fix=fix)
    return Dialect(character, quoted, sure=True)


def check_header(header: Sequence[str], origin: str) -> list[str]:
    """Return the column names without surrounding spaces. A nameless column (a pandas index) is called `unnamed_<position>`."""
    header = [name.strip() for name in header]
    if not any(header):
        raise DataError("the first line is empty, expected the column names", where=f"{origin}:1", fix="Add a header.")
    if len(header) > 2 and not any(header[1:]):
        fix = "Delete all lines above the column names."
        raise DataError(f"the first line is {header[0]!r}, a title, not a header", where=f"{origin}:1", fix=fix)
    names = [name or f"unnamed_{k}" for k, name in enumerate(header, start=1)]
    for k, name in enumerate(names):
        if name in (LINE_COLUMN, BAD_COLUMN):
            fix = "tunesmith stores line numbers in a column of this name; rename the column."
            raise DataError(f"the column name {name!r} is taken", where=f"{origin}:1:{k + 1}", fix=fix)
        if name in names[:k]:
            problem = f"column {name!r} appears twice in the header (fields {names.index(name) + 1} and {k + 1})"
            fix = "Rename one of them."
            if name.replace(".", "", 1).isdigit():  # a row, not a header
                problem, fix = f"the file seems to have no header: {problem}", "Add a first line with column names."
            raise DataError(problem, where=f"{origin}:1:{k + 1}", fix=fix)
    return names


def sniff_dialect(head: str, dialect: Dialect) -> Dialect:
    """Return the dialect of the first lines: a different delimiter if it splits all of them equally and the default doesn't."""
    named = re.match(r"sep=([^\s\w]|\t)\r?\n", head)
    if named is not None:
        return Dialect(named[1], True, sure=True)
    if dialect.sure or _width(head, dialect.delimiter, quoting=dialect.quoting) > 1:
        return dialect
    marks = [mark for mark in DELIMITER_NAMES if mark != dialect.delimiter]
    widths = {mark: _width(head, mark, quoting=True) for mark in marks}
    best = max(widths, key=lambda mark: widths[mark])
    return Dialect(best, True, sure=True) if widths[best] > 1 else dialect


def has_quoted_cells(head: str, dialect: Dialect) -> bool:
    """Return whether most of the first rows have a quoted cell."""
    rows = [line.split(dialect.delimiter) for line in head.splitlines()[1:]]
    quoted = [row for row in rows if any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in row)]
    return len(quoted) * 2 > len(rows)


def _width(head: str, delimiter: str, *, quoting: bool) -> int:
    """Return the number of fields of the first lines; 0 if it differs between them."""
    try:
        rows = list(
            csv.reader(head.splitlines(), delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE)
        )
    except csv.Error:
        return 0
    whole = rows[:-1] if len(rows) > 2 else rows  # the last row may be incomplete
    widths = {len(row) for row in whole if row}
    return widths.pop() if len(widths) == 1 else 0


# --- records ----------------------------------------------------------------------------------------------------------

BLOCK_ROWS = 10_000
_QUOTE_FIX = "Double a quote that is part of the text and enclose the field in quotes, or set --quoting none."
_SKIP = "Or set --skip_bad_rows to skip such rows"
Record = tuple[int, list[str]]
"""The line on which a record starts, and its fields. An empty line has no fields."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows by column. `lines` are the lines on which they start; `bad` is why a row is left empty, by index."""

    columns: Mapping[str, Sequence[str]]
    lines: Sequence[int]
    bad: dict[int, str]


def delimited_blocks(
    lines: Iterable[str], *, origin: str, dialect: Dialect, skip_bad: bool | None = None
) -> Iterator[Block]:
    """Yield the rows in blocks; the header is checked before any row.

    Rows with a wrong number of fields are refused together, or left empty with `skip_bad`. None: skipping is not an option.
    """
    records = _records(lines, origin, dialect)
    header = next(records, None)
    if header is not None and dialect.delimiter.join(header[1]).strip() == f"sep={dialect.delimiter}".strip():
        header = next(records, None)
    if header is None:
        raise DataError("the file is empty", where=origin, fix="It needs a header line and at least one row.")
    names = check_header(header[1], origin)
    rows = _without_blank_end(records) if len(names) > 1 else ((line, fields or [""]) for line, fields in records)
    refused: list[Record] = []
    count = 0
    while some := list(islice(rows, BLOCK_ROWS)):
        count += len(some)
        bad = {i: record for i, record in enumerate(some) if len(record[1]) != len(names)}
        refused += bad.values() if not skip_bad else ()
        if not refused:
            cells = [[""] * len(names) if i in bad else fields for i, (_, fields) in enumerate(some)]
            why = {i: ": ".join(filter(None, (_shape(r, len(names)), dialect.join(r[1])))) for i, r in bad.items()}
            columns = dict(zip(names, zip(*cells, strict=True), strict=True))
            yield Block(columns, [line for line, _ in some], why)
    if refused:
        raise _refuse(refused, count, len(names), origin=origin, dialect=dialect, can_skip=skip_bad is not None)


def _records(lines: Iterable[str], origin: str, dialect: Dialect) -> Iterator[Record]:
    """Yield the records. Wrong quotes are refused at the line on which the record starts."""
    csv.field_size_limit(MAX_RECORD_CHARS)
    last = ""

    def keep(line: str) -> str:
        nonlocal last
        last = line
        return line

    quoting: Any = csv.QUOTE_MINIMAL if dialect.quoting else csv.QUOTE_NONE
    reader = csv.reader(map(keep, lines), delimiter=dialect.delimiter, quoting=quoting, strict=True)
    start = 1
    try:
        for fields in reader:
            yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        closed = f" on line {reader.line_num}" if reader.line_num > start else ""
        problem = f"a quoted field starts here and continues after its closing quote{closed}"
        if "expected after" not in str(error):
            more = f" within {MAX_RECORD_CHARS >> 20} million characters" if "larger" in str(error) else ""
            problem = f"a quoted field starts here and is not closed{more}"
        escaped = 'Quotes inside a field are written as \\". Write them as "" instead.'
        fix = escaped if '\\"' in last else _QUOTE_FIX
        raise DataError(problem, where=f"{origin}:{start}", fix=fix) from None


def _without_blank_end(records: Iterator[Record]) -> Iterator[Record]:
    """Yield the records without empty lines at the end of the file."""
    blank: list[Record] = []
    for record in records:
        if record[1]:
            yield from blank
            blank.clear()
            yield record
        else:
            blank.append(record)


def _shape(record: Record, width: int) -> str:
    """Return what is wrong with the number of fields of a record."""
    count = len(record[1])
    found = "an empty line" if not count else "1 field" if count == 1 else f"{count} fields"
    return f"{found}, expected {width}" + (" fields" if not count else "")


def _refuse(bad: list[Record], rows: int, width: int, *, origin: str, dialect: Dialect, can_skip: bool) -> DataError:
    """Return one error for all rows that do not have the fields of the header."""
    line, fields = bad[0]
    if not fields:
        fix = "Remove it."
    elif len(fields) > width and dialect.quoting:
        fix = f"Enclose a field that contains {dialect.delimiter!r} in quotes."
    elif not dialect.quoting and dialect.join(fields).count('"') % 2:
        fix = "Set --quoting minimal if quotes enclose cells of several lines."
    else:
        fix = "Add or remove fields, or set --delimiter if a different character separates them."
    if len(bad) == 1:
        fix = f"{fix} {_SKIP}." if can_skip else fix
        return DataError(_shape(bad[0], width), where=f"{origin}:{line}", fix=fix)
    shown = [f"  {origin}:{record[0]}: {_shape(record, width)}" for record in bad[:SHOWN]]
    more = [f"  and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else []
    what = "\n".join([f"{len(bad):,} of {rows:,} rows do not match the header:", *shown, *more])
    if can_skip:
        fix = f"{fix} {_SKIP} (bad_rows.jsonl in the run folder lists them)."
    return DataError(what, where=origin, fix=f"\n{fix}")


# --- files to predict -------------------------------------------------------------------------------------------------


def kind_of_rows(path: Path) -> tuple[str, bool]:
    """Return ("csv" | "tsv" | "jsonl" | "parquet", whether it is gzipped), from the name of a file."""
    gzipped = path.suffix.lower() == ".gz"
    kind = KINDS.get((path.with_suffix("") if gzipped else path).suffix.lower(), "")
    kind = "jsonl" if kind == "json" else kind
    if kind not in ("csv", "tsv", "jsonl", "parquet") or (gzipped and kind == "parquet"):
        fix = "Use .csv, .tsv, .jsonl, each also .gz, or .parquet."
        raise ConfigError("cannot be read as rows", where=str(path), fix=fix)
    return kind, gzipped


def column_blocks(
    path: Path, kind: str, reading: Reading, *, gzipped: bool = False
) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Yield the columns of the next rows, in order. A JSON object without a key of its block has None there."""
    origin = str(path)
    dialect = None if kind == "jsonl" else choose_dialect(kind, reading)
    with readable(path, origin), open_bytes(path, gzipped=gzipped) as file:
        lines = text_lines(file, origin, encoding=reading.encoding, dialect=dialect)
        yield from _column_blocks(lines, origin, dialect)


def read_stdin(reading: Reading) -> dict[str, list[Any]]:
    """Return all columns of the csv or JSON lines on stdin; text that starts with a brace is JSON."""
    data = sys.stdin.buffer.read()
    is_json = data.lstrip()[:1] == b"{"
    dialect = None if is_json else choose_dialect("csv", reading)
    lines = text_lines(io.BytesIO(data), "stdin", encoding=reading.encoding, dialect=dialect)
    columns = next(fixed_runs(_column_blocks(lines, "stdin", dialect)), None)
    if columns is None:
        raise DataError("has no rows", where="stdin", fix="It needs a header line and at least one row.")
    return columns


def fixed_runs(
    blocks: Iterator[Mapping[str, Sequence[Any]]], size: int = sys.maxsize
) -> Iterator[dict[str, list[Any]]]:
    """Yield the same rows in blocks of `size`."""
    held: dict[str, list[Any]] = {}
    rows = 0
    for block in blocks:
        count = len(next(iter(block.values()), []))
        for name in {**held, **block}:
            held.setdefault(name, [None] * rows).extend(block.get(name, [None] * count))
        rows += count
        while rows >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
            rows -= size
    if rows:
        yield held


def _column_blocks(lines: Iterator[str], origin: str, dialect: Dialect | None) -> Iterator[Mapping[str, Sequence[Any]]]:
    if dialect is not None:
        head = list(islice(lines, SNIFFED_LINES))
        dialect = sniff_dialect("".join(head), dialect)
        for block in delimited_blocks(chain(head, lines), origin=origin, dialect=dialect):
            yield block.columns
        return
    from tunesmith.data.json_files import BATCH_ROWS, convert_export, flatten_record, line_records

    _, records = convert_export(line_records(lines, origin))
    while some := [flatten_record(row) for _, row in islice(records, BATCH_ROWS)]:
        yield {name: [row.get(name) for row in some] for name in dict.fromkeys(chain.from_iterable(some))}
