"""Records of delimited text, exact to the character.

Rules. Quoting on (RFC 4180): a field is either free of quotes or enclosed in them, with "" for a quote inside; anything else is
refused where the field starts. Quoting off: a quote is a character like any other. Lines end in LF, CRLF or CR, also mixed;
newlines inside a quoted field stay as they are. Every record has as many fields as the first; with `keep_bad` another one is
a row of empty cells, listed in `Records.bad`. Empty lines at the end of the file are not records; anywhere else they are bad
ones, unless the file has one column: there every line is a record. A first line `sep=;`, as Excel writes it, is not a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import methodcaller

from tunesmith.errors import DataError
from tunesmith.reading.blocks import UnreadableText
from tunesmith.reading.ready_commands import rewrite_csv, train_after

MAX_RECORD_CHARS = 16 << 20
"""A longer record is taken for a quote never closed or a file that is not lines: memory stays bounded."""

_QUOTED = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
_QUOTE_FIX = "Double a quote that is part of the text and enclose the field in quotes, or give --quoting none."


@dataclass(frozen=True, slots=True)
class Records:
    """A run of records: `columns[k][i]` is field k of record i, `lines[i]` the line it starts on.

    `bad` is why a record does not have the fields of the header, with its text, by index.
    """

    columns: list[list[str]]
    lines: list[int]
    bad: dict[int, tuple[DataError, str]]


def parse_delimited(
    blocks: Iterable[str],
    *,
    origin: str,
    delimiter: str,
    quoting: bool,
    on_header: Callable[[list[str]], None],
    keep_bad: bool = False,
) -> Iterator[Records]:
    """The records after the first, which is the header: `on_header` may refuse it before any row is looked at."""
    parser = _Parser(origin, delimiter, quoting, on_header, keep_bad=keep_bad)
    try:
        for block in blocks:
            parser.feed(block, final=False)
            if parser.lines:
                yield parser.take()
    except UnreadableText as fault:
        raise fault.at(parser.place_of_end()) from None
    parser.feed("", final=True)
    if parser.header is None:
        raise DataError("the file is empty", where=origin, fix="It needs a header line and at least one row.")
    if parser.lines:
        yield parser.take()


class _Parser:
    """Holds what is left of the last block and where it starts."""

    def __init__(
        self, origin: str, delimiter: str, quoting: bool, on_header: Callable[[list[str]], None], *, keep_bad: bool
    ) -> None:
        self.origin = origin
        self.delimiter = delimiter
        self.quoting = quoting
        self.on_header = on_header
        self.keep_bad = keep_bad
        self.header: list[str] | None = None
        self.line = 1
        self.lines: list[int] = []
        self._columns: list[list[str]] = []
        self._pending = ""
        self._bad: dict[int, tuple[DataError, str]] = {}
        self._blanks: list[int] = []
        d = re.escape(delimiter)
        self._field = re.compile(rf'(?:"([^"]*+(?:""[^"]*+)*+)"|([^"{d}\r\n]*+))({d}|\r\n|\r|\n|\Z)')
        self._plain_field = re.compile(rf"()([^{d}\r\n]*+)({d}|\r\n|\r|\n|\Z)")

    def take(self) -> Records:
        """The records read since the last call."""
        records = Records(self._columns, self.lines, self._bad)
        self._columns, self.lines, self._bad = [[] for _ in self._columns], [], {}
        return records

    def feed(self, text: str, *, final: bool) -> None:
        """Reads all complete records of the pending text and `text`."""
        text = self._pending + text
        at = 0
        if self.header is None and text:
            at = self._read_header(text, final=final)
        while at < len(text) and self.header is not None:
            quote = text.find('"', at) if self.quoting else -1
            end = self._end_of_lines(text, at, quote, final=final)
            if end > at:
                self._read_plain(text[at:end])
                at = end
            if quote < 0:
                break
            after = self._read_quoted(text, at, final=final)
            if after is None:
                break
            at = after
        self._pending = text[at:]
        if len(self._pending) > MAX_RECORD_CHARS:
            raise self._too_long()

    def place_of_end(self) -> str:
        """Line and field at which the text read so far ends."""
        text, at, field = self._pending, 0, 1
        pattern = self._field if self.quoting else self._plain_field
        while (match := pattern.match(text, at)) and match.group(3) == self.delimiter:
            at = match.end()
            field += 1
        return f"{self.origin}:{self.line + _count_lines(text)}:{field}"

    def _end_of_lines(self, text: str, at: int, quote: int, *, final: bool) -> int:
        if quote < 0 and final:
            return len(text)
        limit = len(text) if quote < 0 else quote
        return max(text.rfind("\n", at, limit), text.rfind("\r", at, limit), at - 1) + 1

    def _read_header(self, text: str, *, final: bool) -> int:
        found = self._match_record(text, 0, final=final)
        if found is not None and text[: found[1]].strip() == f"sep={self.delimiter}".strip():
            found = self._match_record(text, found[1], final=final)
        if found is None:
            return 0
        self.header, end = found
        self.on_header(self.header)
        self._columns = [[] for _ in self.header]
        self.line += _count_lines(text[:end])
        return end

    def _read_plain(self, chunk: str) -> None:
        """Lines without any quote that matters: the fast path."""
        if "\r" in chunk:
            chunk = chunk.replace("\r\n", "\n").replace("\r", "\n")
        chunk = chunk.removesuffix("\n")
        lines = chunk.split("\n")
        width = len(self._columns)
        count = len(lines)
        if self._blanks or set(map(methodcaller("count", self.delimiter), lines)) != {width - 1}:
            for i, line in enumerate(lines):
                self._read_line(line, self.line + i)
        else:
            cells = chunk.replace("\n", self.delimiter).split(self.delimiter)
            for k, column in enumerate(self._columns):
                column.extend(cells[k::width])
            self.lines.extend(range(self.line, self.line + len(lines)))
        self.line += count

    def _read_line(self, line: str, number: int) -> None:
        """One line of a chunk in which some line is not like the header."""
        if line == "" and len(self._columns) > 1:
            self._blanks.append(number)  # perhaps the end of the file
        else:
            self._add(line.split(self.delimiter), number, line)

    def _add(self, fields: list[str], line: int, text: str) -> None:
        """Takes a record in, after the empty lines before it."""
        width = len(self._columns)
        for blank in self._blanks:
            self._add_bad(f"an empty line, expected {width} fields", "Remove it.", blank, "")
        self._blanks.clear()
        if len(fields) != width:
            count = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            if len(fields) > width and self.quoting:
                fix = f"Enclose a field that contains {self.delimiter!r} in quotes."
            elif not self.quoting and text.count('"') % 2:
                fix = "Give --quoting rfc4180 if quotes enclose cells of several lines."
            else:
                fix = "Correct the line, or give the right --delimiter."
            self._add_bad(f"{count}, expected {width}", fix, line, text)
            return
        for column, field in zip(self._columns, fields, strict=True):
            column.append(field)
        self.lines.append(line)

    def _add_bad(self, problem: str, fix: str, line: int, text: str) -> None:
        error = DataError(problem, where=f"{self.origin}:{line}", fix=fix)
        if not self.keep_bad:
            raise error
        self._bad[len(self.lines)] = (error, text)
        for column in self._columns:
            column.append("")
        self.lines.append(line)

    def _read_quoted(self, text: str, at: int, *, final: bool) -> int | None:
        """Reads one record and says where it ends; None when the text ends first."""
        found = self._match_record(text, at, final=final)
        if found is None:
            return None
        fields, end = found
        self._add(fields, self.line, text[at:end].rstrip("\r\n"))
        self.line += _count_lines(text[at:end]) or 1
        return end

    def _match_record(self, text: str, start: int, *, final: bool) -> tuple[list[str], int] | None:
        pattern = self._field if self.quoting else self._plain_field
        match_field, delimiter = pattern.match, self.delimiter
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

    def _refuse_quote(self, text: str, start: int, at: int, field: int, *, final: bool) -> None:
        """Returns only when more text may still complete the field."""
        opening = self.line + _count_lines(text[start:at])
        where = f"{self.origin}:{opening}:{field}"
        if text[at] != '"':
            fix = self._fix_spaces() if re.match(' +"', text[at : at + 20]) else _QUOTE_FIX
            raise DataError("a quote inside a field that does not start with one", where=where, fix=fix)
        closed = _QUOTED.match(text, at)
        if closed is None:
            if final:
                raise DataError("the quote opened here is never closed", where=where, fix=_QUOTE_FIX)
            return
        line = opening + _count_lines(closed.group())
        there = "" if line == opening else f" on line {line}"
        after = text[closed.end() : closed.end() + 20].splitlines()[0]
        problem = f"the quoted field opened here is closed{there} and then continues with {after!r}"
        raise DataError(problem, where=where, fix=self._fix_quotes(closed.group()))

    def _fix_spaces(self) -> str:
        change = rewrite_csv(f"delimiter=chr({ord(self.delimiter)}), skipinitialspace=True")
        return f"Quotes stand behind a space. Write the fields without it: {train_after(change, self.origin)}"

    def _fix_quotes(self, field: str) -> str:
        if not field.endswith('\\"'):
            return _QUOTE_FIX
        change = rewrite_csv("escapechar=chr(92), doublequote=False")
        return f'Quotes inside are written \\" and not "". Write them again: {train_after(change, self.origin)}'

    def _too_long(self) -> DataError:
        limit = f"{MAX_RECORD_CHARS >> 20} million characters"
        if self.quoting and '"' in self._pending:
            opening = self.line + _count_lines(self._pending[: self._pending.index('"')])
            problem = f"the quote opened here is not closed within {limit}"
            return DataError(problem, where=f"{self.origin}:{opening}", fix=_QUOTE_FIX)
        return DataError(f"a line of more than {limit}", where=f"{self.origin}:{self.line}", fix="Is this a text file?")


def _count_lines(text: str) -> int:
    """How many line ends: LF, CRLF and CR count one each."""
    if "\r" in text:
        return text.count("\n") + text.count("\r") - text.count("\r\n")
    return text.count("\n")
