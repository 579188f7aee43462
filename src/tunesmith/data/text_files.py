"""How a text file is written: what sets its cells apart, which columns its header names, and its format where the name of the
file does not tell it (.txt).
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass

from tunesmith.config.schema import DELIMITER_WORDS
from tunesmith.data.blocks import describe_nul
from tunesmith.data.ready_commands import rewrite_csv, train_after, train_with, train_with_header
from tunesmith.data.source import BAD_COLUMN, LINE_COLUMN
from tunesmith.errors import ConfigError, DataError

DELIMITER_NAMES = {";": "semicolon", "\t": "tab", "|": "pipe", ",": "comma"}
_RARE_DELIMITERS = ("^", "~", "#", "¦", "§", "\x01", "\x1f")
_SNIFFED_LINES = 20
SHOWN = 10
"""How many bad rows are shown; all are counted."""
_QUOTED = ("rfc4180", "minimal", "csv", "on", "true")
_UNQUOTED = ("none", "off", "false")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How cells are set apart. `sure` when the user named the delimiter."""

    delimiter: str
    quoting: bool
    sure: bool


def choose_dialect(kind: str, *, delimiter: str | None, quoting: str | bool | None) -> Dialect:
    """CSV: comma and RFC 4180 quotes. TSV: tab and no quoting, as GLUE files are. What the user names goes first."""
    word = str(quoting).lower()
    if quoting is not None and word not in (*_QUOTED, *_UNQUOTED):
        raise ConfigError(f"--quoting {quoting!r} is not known", fix="Use 'none' or 'rfc4180'.")
    quoted = kind == "csv" if quoting is None else word in _QUOTED
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
            if name.replace(".", "", 1).isdigit() or any(len(n.split()) > 4 for n in names):  # a row, not a header
                free = [f"column_{n}" for n in range(1, len(names) + 1)]
                named = train_with_header(free, dialect.delimiter, origin, replace=False)
                problem, fix = f"there seems to be no header: {problem}", f"Add a first line with names: {named}"
            else:
                fix = _rename(names, origin, dialect)
            raise DataError(problem, where=f"{origin}:1:{k + 1}", fix=fix)
    return names


def _rename(names: list[str], origin: str, dialect: Dialect) -> str:
    """How to make the column names unique: a command, if the header needs no quotes."""
    seen: Counter[str] = Counter()
    free = []
    for name in names:
        seen[name] += 1
        free.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    plain = all(re.fullmatch(r"[\w .()-]+", name) for name in free) and len(set(free)) == len(free)
    if not plain or not re.search(r"\.(csv|tsv|tab|txt)(\.gz)?$", origin):
        return "Rename one of them."
    return f"Rename one of them, for example: {train_with_header(free, dialect.delimiter, origin, replace=True)}"


def refuse_rows(bad: list[tuple[DataError, str]], rows: int, origin: str, delimiter: str) -> DataError:
    """One error for all rows that are not like the header."""
    first = bad[0][0]
    if len(bad) == 1:
        return first
    shown = [f"  {error.where}: {error.problem}" for error, _ in bad[:SHOWN]]
    more = [f"  and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else []
    what = f"{len(bad):,} of {rows:,} rows are not like the header:\n" + "\n".join([*shown, *more])
    fix = _mend_all([text for _, text in bad[:1000]], delimiter, origin)
    if fix is None:
        skip = train_with(origin, "--skip_bad_rows")
        fix = f"{first.fix}\nOr leave them out (they are written to bad_rows.jsonl of the run): {skip}"
    return DataError(what, where=origin, fix=f"\n{fix}")


def _mend_all(texts: list[str], mark: str, origin: str) -> str | None:
    """The command that repairs all of these lines, if they share a known fault."""
    if mark in DELIMITER_NAMES and all(text.endswith(mark) for text in texts):
        written = "\\t" if mark == "\t" else mark
        cut = train_after(f"sed 's/{written}\\r\\?$//'", origin)
        return f"Lines end with {mark!r}, and the header does not. Cut it off: {cut}"
    if sum(text[:1] == "'" or text[-1:] == "'" for text in texts) * 2 > len(texts):
        again = train_after(rewrite_csv(f"delimiter=chr({ord(mark)}), quotechar=chr(39)"), origin)
        return f"Fields are enclosed in ' and not in \". Write them again: {again}"
    return None


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


def refuse_title(head: str, dialect: Dialect, origin: str) -> None:
    """Refuses a file that begins with a title or a date and not with the column names; the command cuts it off."""
    lines = head.splitlines()[:_SNIFFED_LINES]
    for start in range(1, min(6, len(lines) - 3)):
        title = lines[0] and lines[start] and not any(dialect.delimiter in line for line in lines[:start])
        if title and _width("\n".join(lines[start:]), dialect.delimiter, quoting=dialect.quoting) > 1:
            problem = f"the first line is {lines[0][:60]!r}, and the column names seem to be in line {start + 1}"
            cut = train_after(f"tail -n +{start + 1}", origin)
            raise DataError(problem, where=f"{origin}:1", fix=f"Remove what is above them: {cut}")


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
        raise DataError(problem, where=f"{origin}:1", fix=f"Give --delimiter {likely}.")


FASTTEXT_MARK = "__label__"


def recognise_lines(head: str, origin: str) -> tuple[str, Dialect | None]:
    """("fasttext" | "jsonl" | "csv" | "tsv", how its cells are set apart) of a file that begins with this text."""
    if "\0" in head:
        raise describe_nul(head, origin).at(f"{origin}:1")
    lines = [line for line in head.splitlines()[:200] if line.strip()]
    if sum(line.startswith(FASTTEXT_MARK) for line in lines) * 2 > len(lines):
        return "fasttext", None
    if head.lstrip().startswith("{"):
        return "jsonl", None
    dialect = sniff_dialect(head, choose_dialect("tsv", delimiter=None, quoting=None))
    if _width(head, dialect.delimiter, quoting=dialect.quoting) > 1 and len(lines) > 2:
        return ("tsv" if dialect.delimiter == "\t" else "csv"), dialect
    raise _no_columns(lines, origin)


def _no_columns(lines: list[str], origin: str) -> DataError:
    firsts = Counter(line.split(maxsplit=1)[0] for line in lines)
    problem = f"no columns seen: no {', '.join(DELIMITER_NAMES.values())} cuts all of the first lines alike"
    if len(lines) >= 10 and len(firsts) <= len(lines) / 4 and len(firsts) > 1:
        shown = ", ".join(word for word, _ in firsts.most_common(3))
        cut = train_after(r"sed -e 's/[[:space:]]\+/\t/' -e '1i label\ttext'", origin, suffix=".tsv")
        return DataError(problem, where=origin, fix=f"If the first word of a line is its label ({shown}): {cut}")
    fix = "Give --delimiter, or a file with a text and a label in each line, such as .csv, .tsv or .jsonl."
    return DataError(problem, where=origin, fix=fix)
