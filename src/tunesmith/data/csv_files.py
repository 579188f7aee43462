"""How a text file is written: what sets its cells apart, which columns its header names, and its format where the name of the
file does not tell it (.txt).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

from tunesmith.config.options import DELIMITER_WORDS
from tunesmith.data.files import UnreadableText, describe_nul
from tunesmith.data.source import BAD_COLUMN, LINE_COLUMN
from tunesmith.errors import ConfigError, DataError

DELIMITER_NAMES = {";": "semicolon", "\t": "tab", "|": "pipe", ",": "comma"}
_RARE_DELIMITERS = ("^", "~", "#", "¦", "§", "\x01", "\x1f")
_SNIFFED_LINES = 20
SHOWN = 10
"""How many bad rows are shown; all are counted."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How cells are set apart. `sure` when the user named the delimiter."""

    delimiter: str
    quoting: bool
    sure: bool


def choose_dialect(kind: str, *, delimiter: str | None, quoting: str | None) -> Dialect:
    """CSV: comma and RFC 4180 quotes. TSV: tab and no quoting, as GLUE files are. What the user names goes first."""
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
    """The column names. A nameless column (a pandas index) is called `unnamed_<position>`."""
    if not any(header):
        raise DataError("the first line is empty, expected the column names", where=f"{origin}:1", fix="Add a header.")
    if len(header) == 1 and not dialect.sure:
        _check_delimiter(header[0], origin=origin, dialect=dialect)
    names = [name or f"unnamed_{k}" for k, name in enumerate(header, start=1)]
    for k, name in enumerate(names):
        if name in (LINE_COLUMN, BAD_COLUMN):
            fix = "tunesmith keeps line numbers under it; rename the column."
            raise DataError(f"the column name {name!r} is taken", where=f"{origin}:1:{k + 1}", fix=fix)
        if name in names[:k]:
            problem = f"column {name!r} appears twice in the header (fields {names.index(name) + 1} and {k + 1})"
            fix = "Rename one of them."
            if name.replace(".", "", 1).isdigit():  # a row, not a header
                problem, fix = f"the file seems to have no header: {problem}", "Add a first line with column names."
            raise DataError(problem, where=f"{origin}:1:{k + 1}", fix=fix)
    return names


def refuse_rows(bad: list[tuple[DataError, str]], rows: int, origin: str, delimiter: str) -> DataError:
    """Return one error for all rows that do not have the fields of the header."""
    first = bad[0][0]
    if len(bad) == 1:
        return DataError(first.problem, where=first.where, fix=f"{first.fix} Or set --skip_bad_rows to skip such rows.")
    shown = [f"  {error.where}: {error.problem}" for error, _ in bad[:SHOWN]]
    more = [f"  and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else []
    what = "\n".join([f"{len(bad):,} of {rows:,} rows do not match the header:", *shown, *more])
    texts = [text for _, text in bad[:1000]]
    fix = f"{first.fix} Or set --skip_bad_rows to skip such rows (bad_rows.jsonl in the run folder lists them)."
    if all(text.endswith(delimiter) for text in texts):
        fix = f"Rows end with {delimiter!r}, and the header does not: remove it, or add a column name."
    elif sum(text[:1] == "'" or text[-1:] == "'" for text in texts) * 2 > len(texts):
        fix = "Fields are enclosed in '. Enclose them in \" instead."
    return DataError(what, where=origin, fix=f"\n{fix}")


def sniff_dialect(head: str, dialect: Dialect) -> Dialect:
    """The dialect that the first lines are written in: another delimiter where it cuts all of them alike and ours does not."""
    named = re.match(r"sep=([^\s\w]|\t)\r?\n", head)
    if named is not None:
        return Dialect(named[1], True, sure=True)
    if dialect.sure or _width(head, dialect.delimiter, quoting=dialect.quoting) > 1:
        return dialect
    marks = [mark for mark in (*DELIMITER_NAMES, *_RARE_DELIMITERS) if mark != dialect.delimiter]
    widths = {mark: _width(head, mark, quoting=True) for mark in marks}
    best = max(widths, key=lambda mark: widths[mark])
    return Dialect(best, True, sure=True) if widths[best] > 1 else dialect


def has_quoted_cells(head: str, dialect: Dialect) -> bool:
    """Whether most of the first rows have a cell that is enclosed in quotes."""
    rows = [line.split(dialect.delimiter) for line in head.splitlines()[1 : 1 + _SNIFFED_LINES]]
    quoted = [row for row in rows if any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in row)]
    return len(quoted) * 2 > len(rows)


def _width(head: str, delimiter: str, *, quoting: bool) -> int:
    """Fields in each of the first lines; 0 when they are not equally many."""
    lines = head.splitlines()[:_SNIFFED_LINES]
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE))
    except csv.Error:
        return 0
    whole = rows[:-1] if len(rows) > 2 else rows  # the last one may continue after the lines looked at
    widths = {len(row) for row in whole if row}
    return widths.pop() if len(widths) == 1 else 0


def _check_delimiter(only: str, *, origin: str, dialect: Dialect) -> None:
    found = [mark for mark in DELIMITER_NAMES if mark != dialect.delimiter and mark in only]
    if found:
        likely = DELIMITER_NAMES[max(found, key=only.count)]
        own = DELIMITER_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        problem = f"the header is one field, {only[:60]!r}: fields look set apart by {likely}, not by {own}"
        raise DataError(problem, where=f"{origin}:1", fix=f"Set --delimiter {likely}.")


def recognise_lines(head: str, origin: str) -> tuple[str, Dialect | None]:
    """("jsonl" | "csv" | "tsv", how its cells are set apart) of a file that begins with this text."""
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
"""A longer record is reported as an unclosed quote or as a file without lines, so that memory stays bounded."""

_QUOTED_FIELD = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
_LINE_END = re.compile(r"\r\n|\r|\n")
_QUOTE_FIX = "Double a quote that is part of the text and enclose the field in quotes, or set --quoting none."


@dataclass(slots=True)
class Records:
    """A run of records: `columns[k][i]` is field k of record i, `lines[i]` the line it starts on.

    `bad` is why a record does not have the fields of the header, with its text, by index.
    """

    columns: list[list[str]]
    lines: list[int] = field(default_factory=list)
    bad: dict[int, tuple[DataError, str]] = field(default_factory=dict)


def delimited_batches(blocks: Iterable[str], *, origin: str, dialect: Dialect, skip_bad: bool = False) -> Iterator[Any]:
    """Record batches of strings plus the line numbers; the header is checked before any row.

    Rows with other fields than the header are refused together, or kept empty with the reason in BAD_COLUMN.
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
        raise refuse_rows(bad, count, origin, dialect.delimiter)


def parse_delimited(
    blocks: Iterable[str],
    *,
    origin: str,
    dialect: Dialect,
    on_header: Callable[[list[str]], None],
    keep_bad: bool = False,
) -> Iterator[Records]:
    """The records after the first, which is the header: `on_header` may refuse it before any row is looked at."""
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
    """Holds the records found since the last `take`, what is left of the last block, and the line where that starts."""

    origin: str
    delimiter: str
    quoting: bool
    on_header: Callable[[list[str]], None]
    keep_bad: bool
    width: int = 0
    """Fields of the header, once it was read."""
    found: Records = field(default_factory=lambda: Records([]))
    line: int = 1
    pending: str = ""
    blanks: list[int] = field(default_factory=list)
    field_pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        d = re.escape(self.delimiter)
        self.field_pattern = re.compile(rf'(?:"([^"]*+(?:""[^"]*+)*+)"|([^"{d}\r\n]*+))({d}|\r\n|\r|\n|\Z)')

    def take(self) -> Records:
        """The records read since the last call."""
        records, self.found = self.found, Records([[] for _ in range(self.width)])
        return records

    def feed(self, text: str, *, final: bool = False) -> None:
        """Reads all complete records of the pending text and `text`."""
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
        """Line and field at which the text read so far ends."""
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
        """The fast path: lines without quotes."""
        if "\r" in chunk:
            chunk = chunk.replace("\r\n", "\n").replace("\r", "\n")
        chunk = chunk.removesuffix("\n")
        lines = chunk.split("\n")
        numbers = range(self.line, self.line + len(lines))
        self.line += len(lines)
        if self.blanks or set(map(methodcaller("count", self.delimiter), lines)) != {self.width - 1}:
            for number, line in zip(numbers, lines, strict=True):
                if line == "" and self.width > 1:
                    self.blanks.append(number)  # perhaps the end of the file
                else:
                    self._add(line.split(self.delimiter), number, line)
            return
        cells = chunk.replace("\n", self.delimiter).split(self.delimiter)
        for k, column in enumerate(self.found.columns):
            column.extend(cells[k :: self.width])
        self.found.lines.extend(numbers)

    def _add(self, fields: list[str], line: int, text: str) -> None:
        """Adds a record, after the empty lines before it."""
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
        """The fields of the record that starts here and where it ends; None when the text ends first."""
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
        """Returns only when more text may still complete the field."""
        opening = self.line + _count_lines(text[start:at])
        where = f"{self.origin}:{opening}:{place}"
        if text[at] != '"':
            fix = _QUOTE_FIX
            if re.match(' +"', text[at : at + 20]):
                fix = "There is a space before the quote. Remove the spaces after delimiters."
            raise DataError("a quote inside a field that does not start with one", where=where, fix=fix)
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
    """How many line ends: LF, CRLF and CR count one each."""
    if "\r" in text:
        return text.count("\n") + text.count("\r") - text.count("\r\n")
    return text.count("\n")
