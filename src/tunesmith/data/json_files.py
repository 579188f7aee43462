"""JSON lines, JSON files that hold one array of objects, and fastText lines, `__label__NAME text`.

Rules. One object a line; empty lines only at the end. A key twice, NaN, Infinity, a number too large for a float, nesting deeper
than 64 and half a surrogate pair are refused with their line. A `.json` file that starts with `[` is read whole, so its size
is limited; one that starts with `{` is read as lines.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NoReturn

from tunesmith.data.csv_files import FASTTEXT_MARK
from tunesmith.data.files import UnreadableText
from tunesmith.data.ready_commands import train_after
from tunesmith.data.source import BAD_COLUMN, LINE_COLUMN
from tunesmith.errors import DataError, did_you_mean

MAX_DEPTH = 64
MAX_LINE_CHARS = 16 << 20
MAX_ARRAY_CHARS = 256 << 20
BATCH_ROWS = 4_096
_NEWLINE = re.compile(r"\r\n|\r|\n")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*+")


class _Refused(ValueError):
    """Raised inside the decoder; the caller adds the line."""


def json_batches(blocks: Iterable[str], *, origin: str, kinds: ColumnKinds, array_allowed: bool) -> Iterator[Any]:
    """Record batches of the objects, in order, with line numbers."""
    blocks = iter(blocks)
    head = ""
    try:
        for head in blocks:
            if head.strip():
                break
    except UnreadableText as fault:
        raise fault.at(f"{origin}:1:1") from None
    if head.lstrip().startswith("["):
        if not array_allowed:
            fix = "Write one object a line, or name the file .json."
            raise DataError("starts with '[': an array, not one object a line", where=f"{origin}:1", fix=fix)
        records = _array_records(chain([head], blocks), origin)
    else:
        records = line_records(chain([head], blocks), origin)
    return _batches(records, kinds)


def fasttext_batches(blocks: Iterable[str], *, origin: str, kinds: ColumnKinds) -> Iterator[Any]:
    """Record batches with the columns text and label: names, or lists of names where some line has several."""
    return _batches(_fasttext_records(blocks, origin, kinds), kinds)


def _fasttext_records(blocks: Iterable[str], origin: str, kinds: ColumnKinds) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in text_lines(blocks, origin):
        names, text = [], line.strip()
        while text.startswith(FASTTEXT_MARK):
            first, _, text = text.partition(" ")
            names.append(first.removeprefix(FASTTEXT_MARK))
            text = text.lstrip()
        several = kinds.kinds.get("label", "").startswith("list")
        if len(names) > 1 and not several:
            kinds.kinds.update(text="text", label="list:text")
            raise Widened
        if line.strip():
            yield number, {"text": text, "label": names if several else names[0] if names else None}


def _batches(records: Iterator[tuple[int, dict[str, Any]]], kinds: ColumnKinds) -> Iterator[Any]:
    while some := list(islice(records, BATCH_ROWS)):
        yield kinds.batch([record for _, record in some], [number for number, _ in some])


def line_records(blocks: Iterable[str], origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of JSON lines."""
    blank: int | None = None
    for number, line in text_lines(blocks, origin):
        if not line.strip(" \t"):
            blank = blank or number
            continue
        if blank is not None:
            raise DataError("an empty line, expected an object", where=f"{origin}:{blank}", fix="Remove it.")
        yield number, parse_object(line, f"{origin}:{number}")


def text_lines(blocks: Iterable[str], origin: str) -> Iterator[tuple[int, str]]:
    """(number, line without its line end); text after the last line end counts as a line."""
    number, rest = 1, ""
    try:
        for block in blocks:
            lines = _NEWLINE.split(block) if "\r" in block else block.split("\n")
            lines[0] = rest + lines[0]
            rest = lines.pop()
            for line in lines:
                yield number, line
                number += 1
            if len(rest) > MAX_LINE_CHARS:
                problem = f"a line of more than {MAX_LINE_CHARS >> 20} million characters"
                raise DataError(problem, where=f"{origin}:{number}", fix="Write one object a line.")
    except UnreadableText as fault:
        raise fault.at(f"{origin}:{number}:{len(rest) + 1}") from None
    if rest:
        yield number, rest


def _array_records(blocks: Iterable[str], origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    parts: list[str] = []
    try:
        for block in blocks:
            parts.append(block)
            if sum(map(len, parts)) > MAX_ARRAY_CHARS:
                problem = f"a JSON array of more than {MAX_ARRAY_CHARS >> 20} million characters"
                raise DataError(problem, where=origin, fix="Write JSON lines: one object a line is read as a stream.")
    except UnreadableText as fault:
        raise fault.at(f"{origin}:{1 + sum(len(_NEWLINE.findall(part)) for part in parts)}") from None
    text = "".join(parts)
    _check_depth(text, origin)
    at, number, counted = text.index("[") + 1, 1, 0
    separator = ""
    while True:
        at = _skip_space(text, at)
        number += len(_NEWLINE.findall(text, counted, at))
        counted = at
        where = f"{origin}:{number}"
        if text[at : at + 1] == "]" and separator != ",":
            break
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _explain(error, where) from None
        yield number, _object(value, where)
        at = _skip_space(text, at)
        separator = text[at : at + 1]
        if separator == "]":
            break
        if separator != ",":
            raise DataError("expected ',' or ']' after an object", where=where, fix="The file may be cut short.")
        at += 1
    if text[at + 1 :].strip():
        raise DataError("text after the end of the array", where=where)


def parse_object(line: str, where: str) -> dict[str, Any]:
    """The object on one line, or a DataError at `where`."""
    _check_depth(line, where)
    try:
        return _object(_DECODER.decode(line), where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise _explain(error, where) from None


def _skip_space(text: str, at: int) -> int:
    return at + len(_SPACE.match(text, at)[0])  # type: ignore[index]


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
        found = kinds.get(type(value), "a number")
        fix = 'Write rows such as {"text": "...", "label": "..."}.'
        raise DataError(f"{found}, expected an object", where=where, fix=fix)
    return value


def _check_depth(text: str, where: str) -> None:
    """Refuses deep nesting before the decoder recurses into it; brackets inside strings do not count."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        mark = match.group()[0]
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise DataError(f"nested deeper than {MAX_DEPTH} levels", where=where)
        elif mark in "]}":
            depth -= 1


_BRACKET_OR_STRING = re.compile(rf"[\[\]{{}}]|{_STRING.pattern}", re.DOTALL)


def _explain(error: Exception, where: str) -> DataError:
    if isinstance(error, _Refused):
        return DataError(str(error), where=where)
    if isinstance(error, json.JSONDecodeError):
        problem = f"not JSON: {error.msg} at character {error.colno}"
        return DataError(problem, where=where, fix="Write one object a line.")
    if isinstance(error, RecursionError):
        return DataError(f"nested deeper than {MAX_DEPTH} levels", where=where)
    return DataError(f"not JSON: {' '.join(str(error).split())[:120]}", where=where)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"the key {twice!r} appears twice")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON; use null for no value")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise _Refused(f"the number {digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_refuse_constant, parse_float=_finite)


MOST_KEYS = 1_000
"""Records with more distinct keys than this are not a table."""
_WORDS = {"null": "null", "bool": "true/false", "int": "a whole number", "float": "a number", "text": "text"}


def flatten_record(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The record with `outer.inner` for each key of an object inside; lists that hold objects as JSON text."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and value and all(isinstance(inner, str) for inner in value):
            flat |= flatten_record(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False)
        else:
            flat[f"{prefix}{key}" if prefix else key] = value
    return flat


class Widened(Exception):
    """A column holds a wider kind than the batches already written: the file is read again from the start."""


class ColumnKinds:
    """The kind of every column so far, with the line that first showed it."""

    def __init__(self, origin: str, *, lines: bool) -> None:
        self.origin = origin
        self.lines = lines
        self.kinds: dict[str, str] = {}
        self._since: dict[str, int] = {}
        self._written: dict[str, str] | None = None

    def restart(self) -> None:
        """Starts over, with the kinds found so far."""
        self._written = None

    def batch(self, records: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Any:
        """A record batch of the records; raises Widened when earlier batches need another type."""
        import pyarrow as pa

        records = [flatten_record(r) if any(type(v) in (dict, list) for v in r.values()) else r for r in records]
        for record, number in zip(records, numbers, strict=True):
            if record.keys() != self.kinds.keys():
                self._add_keys(record, number)
        cells = {name: [record.get(name) for record in records] for name in self.kinds}
        for name, values in cells.items():
            self._learn(name, values, numbers)
        if self._written is None:
            self._written = dict(self.kinds)
        elif self._written != self.kinds:
            raise Widened
        arrays = [self._array(name, cells[name], numbers) for name in self.kinds]
        if self.lines:
            return pa.record_batch([*arrays, pa.array(numbers, pa.int64())], names=[*self.kinds, LINE_COLUMN])
        return pa.record_batch(arrays, names=list(self.kinds))

    def _add_keys(self, record: Mapping[str, Any], number: int) -> None:
        """Adds new keys; refuses a key that looks like a misspelling of one that the record lacks."""
        where = f"{self.origin}:{number}"
        if not record:
            raise DataError("an object without keys", where=where)
        new = [key for key in record if key not in self.kinds]
        missing = [name for name in self.kinds if name not in record] if new else []
        for key in new:
            if not isinstance(key, str):
                raise DataError(f"the key {key!r} is not text", where=where)
            if key in (LINE_COLUMN, BAD_COLUMN):
                raise DataError(f"the key {key!r} is taken", where=where, fix="Rename it.")
            if any("\ud800" <= char <= "\udfff" for char in key):
                problem = f"the key {key!r} holds half of a surrogate pair, which is not a character"
                raise DataError(problem, where=where, fix="Rename it.")
            hint = did_you_mean(key, [name for name in missing if "." not in name]) if "." not in key else None
            if hint is not None or len(self.kinds) >= MOST_KEYS:
                problem = f"keys differ from those before: with {key!r}, without {', '.join(map(repr, missing))}"
                raise DataError(problem, where=where, fix=hint or "Give every record the same keys.")
            self.kinds[key], self._since[key] = "null", number

    def _learn(self, name: str, values: list[Any], numbers: Sequence[int]) -> None:
        """Widens the kind of a column to that of its values; a value that fits no such kind is refused."""
        if self.kinds[name] == "text" and set(map(type, values)) <= {str, type(None)}:
            return
        for value, number in zip(values, numbers, strict=True):
            known = self.kinds[name]
            try:
                kind = _kind_of(value)
                wide = _widen(known, kind)
                if wide is None:
                    problem = f"{_say(kind)} here, {_say(known)} in line {self._since[name]}"
                    raise DataError(problem, fix="Keep one kind of value in a column.")
            except DataError as error:
                raise DataError(error.problem, where=f"{self.origin}:{number}:{name}", fix=error.fix) from None
            if wide != known:
                self.kinds[name], self._since[name] = wide, number

    def _array(self, name: str, values: list[Any], numbers: Sequence[int]) -> Any:
        import pyarrow as pa

        kind = self.kinds[name]
        if any(isinstance(value, dict) for value in values):
            values = [json.dumps(v, ensure_ascii=False) if isinstance(v, dict) else v for v in values]
        try:
            return pa.array(values, _arrow_type(kind))
        except (pa.ArrowException, UnicodeError, OverflowError, TypeError):
            for value, number in zip(values, numbers, strict=True):
                try:
                    pa.array([value], _arrow_type(kind))
                except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
                    reason = " ".join(str(error).split())[:120]
                    where = f"{self.origin}:{number}:{name}"
                    raise DataError(f"a value that cannot be stored ({reason})", where=where) from None
            raise


_KINDS = {type(None): "null", bool: "bool", int: "int", float: "float", str: "text", dict: "text"}
"""In this order: true and false are whole numbers to Python."""


def _kind_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        kind: str | None = "null"
        for inner in map(_kind_of, value):
            kind = None if kind is None or inner.startswith("list") else _widen(kind, inner)
        if kind is None:
            fix = "A list holds labels: all text or all whole numbers."
            raise DataError("a list of mixed or nested values", fix=fix)
        return f"list:{kind}"
    for python_type, name in _KINDS.items():
        if isinstance(value, python_type):
            return name
    if getattr(value, "ndim", None) == 0:  # numpy scalars in lists of dicts
        return _kind_of(value.item())
    raise DataError(f"a value of type {type(value).__name__}", fix="Use text, numbers or lists of them.")


def _widen(old: str, new: str) -> str | None:
    """The kind that holds both, or None."""
    if new == "null" or old == new:
        return old
    if old == "null":
        return new
    if {old, new} == {"int", "float"}:
        return "float"
    if old.startswith("list:") and new.startswith("list:"):
        inner = _widen(old[5:], new[5:])
        return f"list:{inner}" if inner else None
    return None


def _say(kind: str) -> str:
    return f"a list of {_WORDS[kind[5:]]}" if kind.startswith("list:") else _WORDS[kind]


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    if kind.startswith("list:"):
        return pa.list_(_arrow_type(kind[5:]))
    return {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}.get(kind, pa.string())


_TABLE = re.compile(r'^\s*\{\s*"(?:[^"\\]|\\.)+"\s*:\s*(?:\{\s*"0"\s*:|\[\s*(?:"|-?\d))')
_KEY = re.compile(r'\s*,?\s*"(?:[^"\\]|\\.)+"\s*:\s*')
_ROWS = re.compile(r'"((?:[^"\\]|\\.)+)"\s*:\s*\[\s*\{')
_COLUMNS = "import pandas, sys; pandas.read_json(sys.argv[1]).to_json(sys.stdout, orient='records', lines=True)"
_LIST = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))[{key!r}]]"
_BY_KEY = "import json, sys; [print(json.dumps(dict(row, key=k))) for k, row in json.load(open(sys.argv[1])).items()]"


def refuse_one_object(head: str, origin: str) -> None:
    """Refuses columns as pandas writes them by default, a list of rows under a key such as "data", and a row for each key."""
    if not head.lstrip().startswith("{") or _is_lines(head):
        return
    found = _ROWS.search(head)
    if _TABLE.match(head):
        problem, code = "one object with a key for each column, not a row for each line", _COLUMNS
    elif found is not None:
        key = json.loads(f'"{found[1]}"')
        problem, code = f"one object with the rows in its key {key!r}, not a row for each line", _LIST.format(key=key)
    elif _has_rows_by_key(head):
        problem, code = "one object with a row for each key, not a row for each line", _BY_KEY
    else:
        return
    command = train_after(f"python -c {shlex.quote(code)}", origin, suffix=".jsonl")
    raise DataError(problem, where=f"{origin}:1", fix=f"Write it as JSON lines: {command}")


def _has_rows_by_key(head: str) -> bool:
    """Whether the first two values of an object are objects with the same keys."""
    at = head.index("{") + 1
    rows: list[Any] = []
    while len(rows) < 2 and (named := _KEY.match(head, at)):
        try:
            row, at = json.JSONDecoder().raw_decode(head, named.end())
        except ValueError:
            break
        rows.append(row)
    return len(rows) == 2 and all(isinstance(row, dict) and row for row in rows) and rows[0].keys() == rows[1].keys()


def _is_lines(head: str) -> bool:
    """Whether the first line is a whole object and the next one starts another."""
    lines = [line for line in head.split("\n") if line.strip()][:2]
    try:
        return len(lines) == 2 and lines[1].lstrip().startswith("{") and isinstance(json.loads(lines[0]), dict)
    except ValueError:
        return False


def refuse_records(origin: str, first_cells: Mapping[str, str]) -> None:
    """For data without a label column whose cells hold records: an error with the command that extracts a label."""
    for name, first in first_cells.items():
        found = _first_leaf(first) if first.startswith(("[", "{")) and re.fullmatch(r"\w+", name) else None
        if found is not None:
            path, value = found
            change = f"jq -c '. + {{label: .{name}{path}}}'"
            command = train_after(change, origin, suffix=".jsonl")
            problem = f"no column is a label; {name!r} holds records with {value!r} at {path}"
            raise DataError(problem, where=origin, fix=f"If that is the label: {command}")


def _first_leaf(cell: str) -> tuple[str, str] | None:
    """(path as jq writes it, value) of the first name inside a cell of JSON text; None when there is none."""
    value: Any = json.loads(cell)
    path = ""
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            path, value = f"{path}[0]", value[0]
            continue
        wanted = ("label", "labels", "choices", "choice", "class", "category", "answer", "value", "result")
        key = next((name for name in wanted if name in value), next(iter(value)))
        path, value = f"{path}.{key}", value[key]
    return (path, str(value)) if isinstance(value, (str, int)) and re.fullmatch(r"[\w.\[\]]+", path) else None
