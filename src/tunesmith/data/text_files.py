"""Text files: bytes, then text, then records of delimited text, block by block, with the exact place of every error.

Bytes: gzip within limits. Text: a byte order mark decides the encoding (UTF-8, UTF-16, UTF-32); without one it is UTF-8 unless an
encoding is set. Bytes that do not decode are refused, never replaced; the error names a likely encoding for the user to confirm.
NUL is refused: it is the mark of UTF-16 or of a damaged file. Only `delimited_batches` needs pyarrow.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunesmith.config.options import DELIMITER_WORDS
from tunesmith.data.rows import BAD_COLUMN, LINE_COLUMN
from tunesmith.errors import ConfigError, DataError, ResourceError

CHUNK_BYTES = 1 << 20
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path that can't be a file: a link to itself, a file used as a folder, a name that is too long."""
KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
KINDS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
KINDS |= dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "sheet")
"""Ending -> format."""


def kind_of_file(path: Path, origin: str, delimiter: str | None) -> tuple[str, bool]:
    """Return (kind, whether it is gzipped); "lines" if the kind must be recognized from the content."""
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
        named = "Rename the file, or set --delimiter if its lines are a table."
        fix = {".zip": "Unpack it first, or use gzip.", "": named}.get(suffix[0], "Save the table as CSV.")
        problem = f"cannot tell the format from the ending {suffix[0]!r}: known are {known}"
        raise DataError(problem, where=origin, fix=fix)
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


def refuse_other_content(head: bytes, kind: str, origin: str, *, gzipped: bool) -> None:
    """Refuse a web page, an archive or a Git LFS pointer that is named like a table."""
    start = head.lstrip(b"\xef\xbb\xbf \r\n\t").lower()
    own = {"sheet": (b"pk",), "parquet": (b"par1",)}.get(kind, ()) + ((b"\x1f\x8b",) if gzipped else ())
    for mark, problem, fix in _OTHER_CONTENT:
        if start.startswith(mark) and not mark.startswith(own or (b"\0",)):
            raise DataError(problem, where=origin, fix=fix)


@dataclass(frozen=True, slots=True)
class DecompressionLimits:
    """How much a compressed file may grow. The ratio is checked after `ratio_free_bytes` of output."""

    max_decompressed_bytes: int = 64 << 30
    max_ratio: float = 200.0
    ratio_free_bytes: int = 64 << 20


def check_growth(unpacked: int, size: int, limits: DecompressionLimits, origin: str) -> None:
    """Refuse a file of `size` bytes that unpacks to more than the limits allow."""
    dense = unpacked > limits.ratio_free_bytes and unpacked > limits.max_ratio * size
    if dense or unpacked > limits.max_decompressed_bytes:
        problem = f"unpacks to {unpacked:,} bytes from {size:,}, over the limit"
        raise DataError(problem, where=origin, fix="If you trust the file, write its rows as JSON lines or CSV.")


class CountedBytes:
    """A file that is read once, from start to end. Decompresses `.gz` within limits; `sha256` covers the bytes on disk."""

    def __init__(
        self,
        path: Path,
        *,
        origin: str,
        gzipped: bool,
        limits: DecompressionLimits,
    ) -> None:
        self.origin = origin
        self.limits = limits
        self.size = path.stat().st_size
        self.bytes_in = self.bytes_out = 0
        self._hash = hashlib.sha256()
        self._file = path.open("rb", buffering=0)
        self._unpacked = gzip.GzipFile(fileobj=_Hooked(self._read_file)) if gzipped else None  # type: ignore[call-overload]

    def __enter__(self) -> CountedBytes:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """Hash of the bytes read so far."""
        return self._hash.hexdigest()

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        """Return up to `size` bytes; b"" at the end."""
        try:
            data: bytes = self._read_file(size) if self._unpacked is None else self._unpacked.read(size)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            problem = f"the gzip file is damaged or truncated after {self.bytes_out:,} bytes ({error})"
            raise DataError(problem, where=self.origin, fix="Make the file again, or copy it again.") from None
        except OSError as error:
            raise ResourceError(f"cannot be read ({error.strerror or error})", where=self.origin) from None
        self.bytes_out += len(data)
        if self._unpacked is not None:
            check_growth(self.bytes_out, self.bytes_in, self.limits, self.origin)
        return data

    def _read_file(self, size: int = -1) -> bytes:
        data = self._file.read(size) or b""
        self._hash.update(data)
        self.bytes_in += len(data)
        return data


@dataclass(frozen=True)
class _Hooked:
    """The raw stream that gzip reads."""

    read: Callable[[int], bytes]


@contextmanager
def readable(path: Path, origin: str) -> Iterator[None]:
    """Turn operating system errors about a file into errors of this package."""
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
        raise DataError(f"cannot be opened ({error.strerror})", where=origin, fix="Pass the path of a file.") from None


def _siblings(path: Path) -> str:
    if not path.parent.is_dir() or not os.access(path.parent, os.R_OK | os.X_OK):
        return ""
    return ", ".join(sorted(p.name for p in path.parent.iterdir() if p.suffix == path.suffix)[:5])


_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark starts with the UTF-16 one
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WITHOUT_MARK = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
OnProgress = Callable[[int, int], None]


class UnreadableText(Exception):
    """Raised after the readable text before it was yielded; the parser adds line and field."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def at(self, where: str) -> DataError:
        """Return the error for the user."""
        return DataError(self.problem, where=where, fix=self.fix)


def text_blocks(stream: CountedBytes, *, encoding: str | None, on_progress: OnProgress | None = None) -> Iterator[str]:
    """Decoded text in order. A CR at the end of a block waits for the next one, so CRLF is never split."""
    head = stream.read(CHUNK_BYTES)
    codec, skip = choose_codec(head, encoding, stream.origin)
    decoder = codecs.getincrementaldecoder(codec)("strict")
    offset, chunk, held = skip, head[skip:], ""
    while True:
        final = not chunk
        fault: UnreadableText | None = None
        try:
            text = decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            start = offset + len(chunk) - len(error.object) + error.start
            text = error.object[: error.start].decode(codec, "replace")
            fault = _describe(error, start, codec)
        text = held + text
        held = ""
        nul = text.find("\0")
        if nul >= 0:
            text, fault = text[:nul], describe_nul(text)
        if text.endswith("\r") and not final and fault is None:
            text, held = text[:-1], "\r"
        if text:
            yield text
        if fault is not None:
            raise fault
        if on_progress is not None:
            on_progress(stream.bytes_in, stream.size)
        if final:
            return
        offset += len(chunk)
        chunk = stream.read(CHUNK_BYTES)


def check_encoding(encoding: str | None) -> str | None:
    """Return the canonical name of a codec; an unknown one is a ConfigError."""
    if encoding is None:
        return None
    try:
        "".encode(encoding)  # refuses codecs that are not text encodings (hex, zlib) as well as unknown names
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        fix = "Common ones: utf-8, utf-16, cp1252, latin-1, shift_jis, gb18030."
        raise ConfigError(f"--encoding {encoding!r} is not known", fix=fix) from None


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


def _describe(error: UnicodeDecodeError, start: int, codec: str) -> UnreadableText:
    bad = error.object[error.start : error.start + 1]
    if error.start + 4 > len(error.object) and error.reason in ("unexpected end of data", "truncated data"):
        problem = f"the file ends inside a character (byte offset {start}, 0x{bad.hex()}): it is truncated"
        return UnreadableText(problem, "Copy the file again.")
    problem = f"byte 0x{bad.hex()} at byte offset {start} is not {codec} ({error.reason})"
    if codec != "utf-8":
        return UnreadableText(problem, "Set the right --encoding.")
    guess, text = guess_encoding(bytes(error.object))
    return UnreadableText(problem, f"Set --encoding {guess} if {text!r} is the right text, or save the file as UTF-8.")


def describe_nul(text: str) -> UnreadableText:
    """Return the error for text with a NUL character."""
    if text.count("\0") * 3 > len(text):
        codec = "utf-16-be" if text.startswith("\0") else "utf-16-le"
        return UnreadableText(
            "a NUL character", f"It looks like UTF-16 without a byte order mark: set --encoding {codec}."
        )
    return UnreadableText("a NUL character", "Remove it; the file may be damaged.")


def guess_encoding(head: bytes) -> tuple[str, str]:
    """Return the likely codec, and a few words of the first line with such bytes, decoded with it."""
    codec = _guess(head)
    line = next((part for part in head.splitlines() if not part.isascii()), b"")
    at = next((k for k, byte in enumerate(line) if byte > 127), 0)
    text = line.decode(codec, "replace")
    start = len(line[:at].decode(codec, "replace"))
    begin = max(text.rfind(mark, 0, start) for mark in ' ,;\t"') + 1
    return codec, text[begin : begin + 24].strip()


def _guess(head: bytes) -> str:
    high = sum(byte > 127 for byte in head)
    letters = sum(65 <= byte <= 90 or 97 <= byte <= 122 for byte in head)
    if high * 2 < letters:  # Latin letters with some accents
        return "cp1252"
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return "cp1252"
    best = from_bytes(head).best()
    return "cp1252" if best is None else str(best.encoding)


DELIMITER_NAMES = {";": "semicolon", "\t": "tab", "|": "pipe", ",": "comma"}
_SNIFFED_LINES = 20
SHOWN = 10
"""Number of bad rows to show; all are counted."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How cells are separated. `sure`: the user set the delimiter."""

    delimiter: str
    quoting: bool
    sure: bool


def choose_dialect(kind: str, *, delimiter: str | None, quoting: str | None) -> Dialect:
    """CSV: comma and RFC 4180 quotes. TSV: tab and no quoting, as in GLUE files. The user's settings take precedence."""
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


def check_header(header: list[str], *, origin: str, dialect: Dialect) -> list[str]:
    """Return the column names without surrounding spaces. A nameless column (a pandas index) is called `unnamed_<position>`."""
    header = [name.strip() for name in header]
    if not any(header):
        raise DataError("the first line is empty, expected the column names", where=f"{origin}:1", fix="Add a header.")
    if len(header) > 2 and not any(header[1:]):
        fix = "Delete all lines above the column names."
        raise DataError(f"the first line is {header[0]!r}, a title, not a header", where=f"{origin}:1", fix=fix)
    if len(header) == 1 and not dialect.sure:
        _check_delimiter(header[0], origin=origin, dialect=dialect)
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


def refuse_rows(bad: list[tuple[DataError, str]], rows: int, origin: str) -> DataError:
    """Return one error for all rows that do not have the fields of the header."""
    first = bad[0][0]
    if len(bad) == 1:
        return DataError(first.problem, where=first.where, fix=f"{first.fix} Or set --skip_bad_rows to skip such rows.")
    shown = [f"  {error.where}: {error.problem}" for error, _ in bad[:SHOWN]]
    more = [f"  and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else []
    what = "\n".join([f"{len(bad):,} of {rows:,} rows do not match the header:", *shown, *more])
    texts = [text for _, text in bad[:1000]]
    fix = f"{first.fix} Or set --skip_bad_rows to skip such rows (bad_rows.jsonl in the run folder lists them)."
    if sum(text[:1] == "'" or text[-1:] == "'" for text in texts) * 2 > len(texts):
        fix = "Fields are enclosed in '. Enclose them in \" instead."
    return DataError(what, where=origin, fix=f"\n{fix}")


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
    rows = [line.split(dialect.delimiter) for line in head.splitlines()[1 : 1 + _SNIFFED_LINES]]
    quoted = [row for row in rows if any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in row)]
    return len(quoted) * 2 > len(rows)


def _width(head: str, delimiter: str, *, quoting: bool) -> int:
    """Return the number of fields of the first lines; 0 if it differs between them."""
    lines = head.splitlines()[:_SNIFFED_LINES]
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE))
    except csv.Error:
        return 0
    whole = rows[:-1] if len(rows) > 2 else rows  # the last row may be incomplete
    widths = {len(row) for row in whole if row}
    return widths.pop() if len(widths) == 1 else 0


def _check_delimiter(only: str, *, origin: str, dialect: Dialect) -> None:
    found = [mark for mark in DELIMITER_NAMES if mark != dialect.delimiter and mark in only]
    if found:
        likely = DELIMITER_NAMES[max(found, key=only.count)]
        own = DELIMITER_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        problem = f"the header is one field, {only[:60]!r}: fields seem to be separated by {likely}, not by {own}"
        raise DataError(problem, where=f"{origin}:1", fix=f"Set --delimiter {likely}.")


def recognise_lines(head: str, origin: str) -> tuple[str, Dialect | None]:
    """("jsonl" | "csv" | "tsv", its dialect) of a file that begins with this text."""
    if "\0" in head:
        raise describe_nul(head).at(f"{origin}:1")
    lines = [line for line in head.splitlines()[:200] if line.strip()]
    if head.lstrip().startswith("{"):
        return "jsonl", None
    dialect = sniff_dialect(head, choose_dialect("tsv", delimiter=None, quoting=None))
    if _width(head, dialect.delimiter, quoting=dialect.quoting) > 1 and len(lines) > 2:
        return ("tsv" if dialect.delimiter == "\t" else "csv"), dialect
    problem = f"no columns found: no {', '.join(DELIMITER_NAMES.values())} separates all of the first lines alike"
    fix = "Set --delimiter, or use a file with a text and a label in each line, such as .csv, .tsv or .jsonl."
    raise DataError(problem, where=origin, fix=fix)


MAX_RECORD_CHARS = 16 << 20
"""Longer records are reported as an unclosed quote or a file without lines, so that memory use is limited."""

_QUOTED_FIELD = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
_LINE_END = re.compile(r"\r\n|\r|\n")
_QUOTE_FIX = "Double a quote that is part of the text and enclose the field in quotes, or set --quoting none."


@dataclass(slots=True)
class Records:
    """A block of records: `columns[k][i]` is field k of record i, `lines[i]` the line it starts on.

    `bad` is why a record does not have the fields of the header, with its text, by index.
    """

    columns: list[list[str]]
    lines: list[int] = field(default_factory=list)
    bad: dict[int, tuple[DataError, str]] = field(default_factory=dict)


def delimited_batches(blocks: Iterable[str], *, origin: str, dialect: Dialect, skip_bad: bool = False) -> Iterator[Any]:
    """Record batches of strings plus the line numbers; the header is checked before any row.

    Rows with a wrong number of fields are refused together, or kept empty with the reason in BAD_COLUMN.
    """
    import pyarrow as pa

    names: list[str] = []
    bad: list[tuple[DataError, str]] = []
    count = 0

    def on_header(header: list[str]) -> None:
        names.extend(check_header(header, origin=origin, dialect=dialect))

    try:
        for rows in parse_delimited(blocks, origin=origin, dialect=dialect, on_header=on_header, keep_bad=True):
            count += len(rows.lines)
            bad += () if skip_bad else rows.bad.values()
            if bad:
                continue
            columns = {name: pa.array(column, pa.string()) for name, column in zip(names, rows.columns, strict=True)}
            columns[LINE_COLUMN] = pa.array(rows.lines, pa.int64())
            if skip_bad:
                why = {
                    i: f"{error.problem}: {text}" if text else error.problem for i, (error, text) in rows.bad.items()
                }
                columns[BAD_COLUMN] = pa.array([why.get(i) for i in range(len(rows.lines))], pa.string())
            yield pa.record_batch(columns)
    except DataError:
        if not bad:
            raise
    if bad:
        raise refuse_rows(bad, count, origin)


def parse_delimited(
    blocks: Iterable[str],
    *,
    origin: str,
    dialect: Dialect,
    on_header: Callable[[list[str]], None],
    keep_bad: bool = False,
) -> Iterator[Records]:
    """Yield the records after the header. `on_header` may refuse the header before any row is parsed."""
    parser = _Parser(origin, dialect.delimiter, dialect.quoting, on_header, keep_bad)
    try:
        for block in blocks:
            parser.feed(block)
            if parser.found.lines:
                yield parser.take()
    except UnreadableText as fault:
        raise fault.at(parser.place_of_end()) from None
    parser.feed("", final=True)
    if parser.width == 0:
        raise DataError("the file is empty", where=origin, fix="It needs a header line and at least one row.")
    if parser.found.lines:
        yield parser.take()


@dataclass(slots=True)
class _Parser:
    """Parser state: the records since the last `take`, the rest of the last block and its first line."""

    origin: str
    delimiter: str
    quoting: bool
    on_header: Callable[[list[str]], None]
    keep_bad: bool
    width: int = 0
    """Number of fields of the header, once it is read."""
    found: Records = field(default_factory=lambda: Records([]))
    line: int = 1
    pending: str = ""
    blanks: list[int] = field(default_factory=list)
    field_pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        d = re.escape(self.delimiter)
        self.field_pattern = re.compile(rf'(?:"([^"]*+(?:""[^"]*+)*+)"|([^"{d}\r\n]*+))({d}|\r\n|\r|\n|\Z)')

    def take(self) -> Records:
        """Return the records read since the last call."""
        records, self.found = self.found, Records([[] for _ in range(self.width)])
        return records

    def feed(self, text: str, *, final: bool = False) -> None:
        """Read all complete records of the pending text and `text`."""
        text = self.pending + text
        at = self._read_header(text, final=final) if not self.width and text else 0
        while at < len(text) and self.width:
            quote = text.find('"', at) if self.quoting else -1
            limit = len(text) if quote < 0 else quote
            end = max(text.rfind("\n", at, limit), text.rfind("\r", at, limit), at - 1) + 1
            end = limit if final and quote < 0 else end
            if end > at:  # whole lines without a quote
                self._read_plain(text[at:end])
                at = end
            found = self._match_record(text, at, final=final) if quote >= 0 else None
            if found is None:
                break
            fields, end = found
            self._add(fields, self.line, text[at:end].rstrip("\r\n"))
            self.line += _count_lines(text[at:end]) or 1
            at = end
        self.pending = text[at:]
        if len(self.pending) > MAX_RECORD_CHARS:
            raise self._too_long()

    def place_of_end(self) -> str:
        """Return the line and field at which the text read so far ends."""
        text, at, place = self.pending, 0, 1
        if not self.quoting:
            place += text.count(self.delimiter)
        while self.quoting and (match := self.field_pattern.match(text, at)) and match.group(3) == self.delimiter:
            at, place = match.end(), place + 1
        return f"{self.origin}:{self.line + _count_lines(text)}:{place}"

    def _read_header(self, text: str, *, final: bool) -> int:
        found = self._match_record(text, 0, final=final)
        if found is not None and text[: found[1]].strip() == f"sep={self.delimiter}".strip():
            found = self._match_record(text, found[1], final=final)
        if found is None:
            return 0
        header, end = found
        self.on_header(header)
        self.width = len(header)
        self.take()
        self.line += _count_lines(text[:end])
        return end

    def _read_plain(self, chunk: str) -> None:
        """Parse lines without quotes, the fast path."""
        if "\r" in chunk:
            chunk = chunk.replace("\r\n", "\n").replace("\r", "\n")
        chunk = chunk.removesuffix("\n")
        lines = chunk.split("\n")
        numbers = range(self.line, self.line + len(lines))
        self.line += len(lines)
        if self.blanks or set(map(methodcaller("count", self.delimiter), lines)) != {self.width - 1}:
            for number, line in zip(numbers, lines, strict=True):
                if line == "" and self.width > 1:
                    self.blanks.append(number)  # allowed only at the end of the file
                else:
                    self._add(line.split(self.delimiter), number, line)
            return
        cells = chunk.replace("\n", self.delimiter).split(self.delimiter)
        for k, column in enumerate(self.found.columns):
            column.extend(cells[k :: self.width])
        self.found.lines.extend(numbers)

    def _add(self, fields: list[str], line: int, text: str) -> None:
        """Add a record, after the empty lines before it."""
        for blank in self.blanks:
            self._add_bad(f"an empty line, expected {self.width} fields", "Remove it.", blank, "")
        self.blanks.clear()
        if len(fields) != self.width:
            count = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            if len(fields) > self.width and self.quoting:
                fix = f"Enclose a field that contains {self.delimiter!r} in quotes."
            elif not self.quoting and text.count('"') % 2:
                fix = "Set --quoting minimal if quotes enclose cells of several lines."
            else:
                fix = "Correct the line, or set --delimiter."
            self._add_bad(f"{count}, expected {self.width}", fix, line, text)
            return
        for column, cell in zip(self.found.columns, fields, strict=True):
            column.append(cell)
        self.found.lines.append(line)

    def _add_bad(self, problem: str, fix: str, line: int, text: str) -> None:
        error = DataError(problem, where=f"{self.origin}:{line}", fix=fix)
        if not self.keep_bad:
            raise error
        self.found.bad[len(self.found.lines)] = (error, text)
        for column in self.found.columns:
            column.append("")
        self.found.lines.append(line)

    def _match_record(self, text: str, start: int, *, final: bool) -> tuple[list[str], int] | None:
        """Return the fields of the record that starts here and its end; None if the text ends first."""
        if not self.quoting:
            ending = _LINE_END.search(text, start)
            if ending is None:
                return (text[start:].split(self.delimiter), len(text)) if final else None
            return text[start : ending.start()].split(self.delimiter), ending.end()
        match_field, delimiter = self.field_pattern.match, self.delimiter
        fields: list[str] = []
        at = start
        while True:
            match = match_field(text, at)
            if match is None:
                self._refuse_quote(text, start, at, len(fields) + 1, final=final)
                return None
            quoted, plain, end = match.groups()
            fields.append(quoted.replace('""', '"') if plain is None else plain)
            at = match.end()
            if end != delimiter:
                return (fields, at) if end or final else None

    def _refuse_quote(self, text: str, start: int, at: int, place: int, *, final: bool) -> None:
        """Raise the error for a bad quote; return if more text may still complete the field."""
        opening = self.line + _count_lines(text[start:at])
        where = f"{self.origin}:{opening}:{place}"
        if text[at] != '"':
            raise DataError("a quote inside a field that does not start with one", where=where, fix=_QUOTE_FIX)
        closed = _QUOTED_FIELD.match(text, at)
        if closed is None:
            if final:
                raise DataError("the quote opened here is never closed", where=where, fix=_QUOTE_FIX)
            return
        line = opening + _count_lines(closed.group())
        there = "" if line == opening else f" on line {line}"
        after = text[closed.end() : closed.end() + 20].splitlines()[0]
        problem = f"the quoted field opened here is closed{there} and then continues with {after!r}"
        escaped = 'Quotes inside a field are written as \\". Write them as "" instead.'
        raise DataError(problem, where=where, fix=escaped if closed.group().endswith('\\"') else _QUOTE_FIX)

    def _too_long(self) -> DataError:
        limit = f"{MAX_RECORD_CHARS >> 20} million characters"
        if self.quoting and '"' in self.pending:
            opening = self.line + _count_lines(self.pending[: self.pending.index('"')])
            problem = f"the quote opened here is not closed within {limit}"
            return DataError(problem, where=f"{self.origin}:{opening}", fix=_QUOTE_FIX)
        return DataError(f"a line of more than {limit}", where=f"{self.origin}:{self.line}", fix="Is this a text file?")


def _count_lines(text: str) -> int:
    """Count line ends: LF, CRLF and CR count as one each."""
    if "\r" in text:
        return text.count("\n") + text.count("\r") - text.count("\r\n")
    return text.count("\n")


TEXT_KINDS = ("csv", "tsv", "jsonl")


def kind_of_rows(path: Path) -> tuple[str, bool]:
    """Return ("csv" | "tsv" | "jsonl" | "parquet", whether it is gzipped), from the name of a file."""
    gzipped = path.suffix.lower() == ".gz"
    kind = (path.with_suffix("") if gzipped else path).suffix.lower().removeprefix(".")
    kind = {"ndjson": "jsonl", "json": "jsonl", "tab": "tsv", "pq": "parquet"}.get(kind, kind)
    if kind not in (*TEXT_KINDS, "parquet") or (gzipped and kind == "parquet"):
        fix = "Use .csv, .tsv, .jsonl, each also .gz, or .parquet."
        raise ConfigError("cannot be read as rows", where=str(path), fix=fix)
    return kind, gzipped


def column_blocks(
    path: Path,
    *,
    kind: str,
    gzipped: bool = False,
    encoding: str | None = None,
    delimiter: str | None = None,
    quoting: str | None = None,
) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of the next rows, in order. A JSON object without a key of its block has None there."""
    origin = str(path)
    with (
        readable(path, origin),
        CountedBytes(path, origin=origin, gzipped=gzipped, limits=DecompressionLimits()) as file,
    ):
        dialect = None if kind == "jsonl" else choose_dialect(kind, delimiter=delimiter, quoting=quoting)
        yield from _column_blocks(text_blocks(file, encoding=encoding), origin, dialect)


def read_stdin(*, encoding: str | None, delimiter: str | None, quoting: str | None) -> dict[str, list[Any]]:
    """Return all columns of the csv or JSON lines on stdin; text that starts with a brace is JSON."""
    data = sys.stdin.buffer.read()
    stream: Any = SimpleNamespace(read=BytesIO(data).read, origin="stdin")
    is_json = data.lstrip()[:1] == b"{"
    dialect = None if is_json else choose_dialect("csv", delimiter=delimiter, quoting=quoting)
    columns = next(fixed_runs(_column_blocks(text_blocks(stream, encoding=encoding), "stdin", dialect)), None)
    if columns is None:
        raise DataError("has no rows", where="stdin", fix="It needs a header line and at least one row.")
    return columns


def fixed_runs(blocks: Iterator[dict[str, list[Any]]], size: int = sys.maxsize) -> Iterator[dict[str, list[Any]]]:
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


def _column_blocks(blocks: Iterator[str], origin: str, dialect: Dialect | None) -> Iterator[dict[str, list[Any]]]:
    if dialect is None:
        from tunesmith.data.json_files import BATCH_ROWS, convert_export, flatten_record, line_records

        _, records = convert_export(line_records(blocks, origin))
        while some := [flatten_record(row) for _, row in islice(records, BATCH_ROWS)]:
            yield {name: [row.get(name) for row in some] for name in dict.fromkeys(chain.from_iterable(some))}
        return
    try:
        head = next(blocks, "")
    except UnreadableText as fault:
        raise fault.at(f"{origin}:1:1") from None
    dialect = sniff_dialect(head, dialect)
    names: list[str] = []

    def on_header(header: list[str]) -> None:
        names.extend(check_header(header, origin=origin, dialect=dialect))

    for found in parse_delimited(chain([head], blocks), origin=origin, dialect=dialect, on_header=on_header):
        yield dict(zip(names, found.columns, strict=True))
