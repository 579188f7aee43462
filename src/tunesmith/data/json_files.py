"""JSON lines, JSON files, and the exports of Label Studio, Doccano and Argilla.

Rules. JSON lines have one object per line; empty lines are allowed only at the end. A key that appears twice, NaN, Infinity, a
number too large for a float, deep nesting and half a surrogate pair are refused with their line. A `.json` file may
also be one array of objects, or one object with a list of them; it is read whole, so its size is limited.

A key that a record does not have is null there, unless the record has a key of almost that name. A column contains text,
integers, numbers, true/false or lists of one of these, and null; integers mixed with fractions become numbers. An object inside a
record becomes one column per key, `data.text`; lists of objects are kept as JSON text.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NoReturn

from tunesmith.data.rows import BAD_COLUMN, LINE_COLUMN
from tunesmith.data.text_files import MAX_ARRAY_CHARS
from tunesmith.errors import DataError, did_you_mean, short_text

MOST_KEYS = 1_000
"""Records with more distinct keys than this are not a table."""
BATCH_ROWS = 4_096
_NEWLINE = re.compile(r"\r\n|\r|\n")
_SPACE = re.compile(r"[ \t\r\n]*+")
_FLAT = "Write the inner parts as text."

Record = tuple[int, dict[str, Any]]
"""The line on which an object starts, and the object."""


def json_table(lines: Iterable[str], origin: str, *, array_allowed: bool) -> tuple[Any, str | None]:
    """Return the objects as a table with line numbers, and the annotation tool that wrote them."""
    tool, records = convert_export(_json_records(iter(lines), origin, array_allowed=array_allowed))
    return records_table(records, origin, lines=True), tool


def records_table(records: Iterator[Record], origin: str, *, lines: bool) -> Any:
    """Return the objects as a table; `lines`: with their line numbers, as they are from a file."""
    import pyarrow as pa

    types = ColumnTypes(origin, lines=lines)
    parts = []
    while some := list(islice(records, BATCH_ROWS)):
        parts.append(types.table([record for _, record in some], [number for number, _ in some]))
    if not parts:
        return pa.table({})
    try:
        whole = pa.concat_tables(parts, promote_options="permissive")
    except _UNFIT as error:  # such as an integer that a float can't represent
        raise DataError(f"a column mixes types ({short_text(error)})", where=origin, fix=_ONE_TYPE) from None
    text = {pa.null(): pa.string(), pa.list_(pa.null()): pa.list_(pa.string())}
    return whole.cast(pa.schema([field.with_type(text.get(field.type, field.type)) for field in whole.schema]))


# --- parsing ----------------------------------------------------------------------------------------------------------


def _json_records(lines: Iterator[str], origin: str, *, array_allowed: bool) -> Iterator[Record]:
    head: list[str] = []
    filled: list[str] = []
    while len(filled) < 2 and (line := next(lines, None)) is not None:
        head.append(line)
        filled += [line] if line.strip() else []
    start, every = filled[0].lstrip()[:1] if filled else "", chain(head, lines)
    if start == "[":
        if not array_allowed:
            fix = "Write one object per line, or name the file .json."
            raise DataError("starts with '[': an array, not one object per line", where=f"{origin}:1", fix=fix)
        return _array_records(_whole(every, origin), origin)
    if start == "{" and array_allowed and not _is_lines(filled):
        text = _whole(every, origin)
        try:
            value = _DECODER.decode(text)
        except json.JSONDecodeError:
            return line_records(io.StringIO(text, newline=""), origin)
        except (ValueError, RecursionError) as error:
            raise _explain(error, origin) from None
        return enumerate(rows_of_object(_object(value, origin), origin), start=1)
    return line_records(every, origin)


def _is_lines(lines: Sequence[str]) -> bool:
    """Return whether the first line is a complete object and the next line starts another one."""
    try:
        return len(lines) == 2 and lines[1].lstrip().startswith("{") and isinstance(json.loads(lines[0]), dict)
    except ValueError:
        return False


def rows_of_object(value: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    """Return the rows of one object: a list of rows under a key such as "data", or one key per column (pandas)."""
    cells = list(value.values())
    lists = {
        name: rows for name, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    if len(lists) > 1:
        found = ", ".join(f"{name!r} ({len(rows):,})" for name, rows in lists.items())
        raise DataError(f"has several lists of rows: {found}", where=origin, fix="Write each list to its own file.")
    if lists:
        return next(iter(lists.values()))
    if len(cells) > 1 and all(isinstance(column, dict) and "0" in column for column in cells):
        return [{name: column.get(key) for name, column in value.items()} for key in cells[0]]
    return [value]


def line_records(lines: Iterable[str], origin: str) -> Iterator[Record]:
    """Yield the objects of JSON lines."""
    blank: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip(" \t\r\n"):
            blank = blank or number
            continue
        if blank is not None:
            raise DataError("an empty line, expected an object", where=f"{origin}:{blank}", fix="Remove it.")
        yield number, parse_object(line.rstrip("\r\n"), f"{origin}:{number}")


def _whole(lines: Iterable[str], origin: str) -> str:
    parts: list[str] = []
    size = 0
    for line in lines:
        parts.append(line)
        size += len(line)
        if size > MAX_ARRAY_CHARS:
            problem = f"JSON of more than {MAX_ARRAY_CHARS >> 20} million characters"
            raise DataError(problem, where=origin, fix="Write one object per line: JSON lines are read as a stream.")
    return "".join(parts)


def _array_records(text: str, origin: str) -> Iterator[Record]:
    at, number, counted = text.index("[") + 1, 1, 0
    one_line = _NEWLINE.search(text.strip()) is None  # then rows are counted, not lines
    separator = ""
    while True:
        at = _skip_space(text, at)
        number += int(separator == ",") if one_line else len(_NEWLINE.findall(text, counted, at))
        counted = at
        where = f"{origin}:{number}"
        if text[at : at + 1] == "]" and separator != ",":
            break
        try:
            if text[at : at + 1] == "]":
                raise DataError("a comma after the last object", fix="Remove it.")
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _explain(error, where) from None
        yield number, _object(value, where)
        at = _skip_space(text, at)
        separator = text[at : at + 1]
        if separator == "]":
            break
        if separator != ",":
            raise DataError("expected ',' or ']' after an object", where=where, fix="The file may be truncated.")
        at += 1
    if text[at + 1 :].strip():
        raise DataError("text after the end of the array", where=where, fix="Remove it.")


def parse_object(line: str, where: str) -> dict[str, Any]:
    """Return the object on one line, or raise a DataError at `where`."""
    try:
        value = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise _explain(error, where) from None
    return _object(value, where)


def _skip_space(text: str, at: int) -> int:
    return at + len(_SPACE.match(text, at)[0])  # type: ignore[index]


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
        found = kinds.get(type(value), "a number")
        fix = 'Write rows such as {"text": "...", "label": "..."}.'
        raise DataError(f"{found}, expected an object", where=where, fix=fix)
    return value


def _explain(error: Exception, where: str) -> DataError:
    """Return an error of the decoder, or of one of its functions below, with the place."""
    if isinstance(error, DataError):
        return DataError(error.problem, where=where, fix=error.fix)
    if isinstance(error, RecursionError):
        return DataError("nested too deeply", where=where, fix=_FLAT)
    if isinstance(error, json.JSONDecodeError):
        problem = f"not JSON: {error.msg} at character {error.colno}"
        return DataError(problem, where=where, fix="Correct it; if the file is incomplete, copy it again.")
    return DataError("a number with thousands of digits", where=where, fix="Write it as text, or correct it.")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} appears twice", fix="Rename or remove one of them.")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise DataError(f"{name} is not JSON", fix="Use null for a missing value.")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise DataError(f"the number {digits[:40]} is too large", fix="Write it as text, or correct it.")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_refuse_constant, parse_float=_finite)


# --- exports of annotation tools --------------------------------------------------------------------------------------


def convert_export(records: Iterator[Record]) -> tuple[str | None, Iterator[Record]]:
    """Return the annotation tool that wrote the records, recognized by the first one, and its tasks as rows."""
    first = next(records, None)
    if first is None:
        return None, records
    tool, convert = find_export(first[1])
    whole = chain([first], records)
    return tool, whole if convert is None else ((number, convert(record)) for number, record in whole)


def find_export(record: Mapping[str, Any]) -> tuple[str | None, Callable[[Mapping[str, Any]], dict[str, Any]] | None]:
    """Return the tool that wrote this record and the function that converts its records, or (None, None).

    Doccano's records are plain rows whose label is a list.
    """
    if isinstance(record.get("data"), dict) and isinstance(record.get("annotations"), list):
        return "Label Studio", label_studio_row
    if isinstance(record.get("fields"), dict) and isinstance(record.get("responses"), dict):
        return "Argilla", argilla_row
    return None, None


def label_studio_row(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a task, and the answer for each control (`from_name`) of the annotators' majority."""
    answers: dict[str, list[Any]] = {}
    for annotation in task.get("annotations") or []:
        if isinstance(annotation, dict) and not annotation.get("was_cancelled"):
            for result in annotation.get("result") or []:
                value = result.get("value") if isinstance(result, dict) else None
                if isinstance(value, dict):
                    kind = next((k for k in ("choices", "rating", "number", "taxonomy") if k in value), None)
                    if kind is not None:
                        answers.setdefault(str(result.get("from_name") or "label"), []).append(value[kind])
    return {**(task.get("data") or {}), **{name: _majority(found) for name, found in answers.items()}}


def argilla_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record, and the majority of the responses to each question."""
    row = dict(record.get("fields") or {})
    for name, responses in (record.get("responses") or {}).items():
        given = [r for r in responses or [] if isinstance(r, dict) and r.get("status") in (None, "submitted")]
        row[name] = _majority([r.get("value") for r in given])
    return row


def merge_responses(table: Any) -> Any:
    """Return Argilla's table, which has one column per question, `label.responses`, with the majority as `label`."""
    import pyarrow as pa

    questions = [f.name for f in table.schema if f.name.endswith(".responses") and pa.types.is_list(f.type)]
    columns = {}
    for name in table.schema.names:
        if name in questions:
            answers = [_majority(cell or []) for cell in table[name].to_pylist()]
            columns[name.removesuffix(".responses")] = pa.array(answers, table[name].type.value_type)
        elif ".responses." not in name and ".suggestion" not in name:
            columns[name] = table[name]
    return pa.table(columns)


def _majority(answers: Sequence[Any]) -> Any:
    """Return the most frequent answer, the first of equally frequent ones; None if there is none."""
    known = [answer for answer in answers if answer not in (None, [], "")]
    if not known:
        return None
    counts = Counter(json.dumps(answer, sort_keys=True, default=str) for answer in known)
    best = counts.most_common(1)[0][0]
    return next(answer for answer in known if json.dumps(answer, sort_keys=True, default=str) == best)


# --- records -> columns -----------------------------------------------------------------------------------------------


def flatten_record(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the record with `outer.inner` for each key of an object inside; other objects, also in lists, as JSON text."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        nested = isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
        try:
            if isinstance(value, dict) and value and all(isinstance(inner, str) for inner in value):
                flat |= flatten_record(value, f"{prefix}{key}.")
            elif nested or isinstance(value, dict):
                flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False)
            else:
                flat[f"{prefix}{key}" if prefix else key] = value
        except RecursionError:
            raise DataError(f"the key {key!r:.40} is nested too deeply", fix=_FLAT) from None
    return flat


_UNFIT = (ValueError, TypeError, OverflowError)
"""Errors of pyarrow for values that don't fit a type."""
_ONE_TYPE = "Use one type per column: text, numbers, true/false or lists of one of these."


class ColumnTypes:
    """The Arrow type of every column so far, with the first line that has it."""

    def __init__(self, origin: str, *, lines: bool) -> None:
        self.origin = origin
        self.lines = lines
        self.types: dict[str, Any] = {}
        self._since: dict[str, int] = {}

    def table(self, records: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Any:
        """Return a table of the records. A later one may have wider types."""
        import pyarrow as pa

        records = [flatten_record(r) if any(type(v) in (dict, list) for v in r.values()) else r for r in records]
        for record, number in zip(records, numbers, strict=True):
            if record.keys() != self.types.keys():
                self._add_keys(record, number)
        columns = {name: self._array(name, [r.get(name) for r in records], numbers) for name in self.types}
        if self.lines:
            columns[LINE_COLUMN] = pa.array(numbers, pa.int64())
        return pa.table(columns)

    def _add_keys(self, record: Mapping[str, Any], number: int) -> None:
        """Add new keys; refuse a key that looks like a misspelling of one that the record lacks."""
        import pyarrow as pa

        where = f"{self.origin}:{number}"
        if not record:
            raise DataError("an object without keys", where=where, fix="Write the same keys in every record.")
        new = [key for key in record if key not in self.types]
        missing = [name for name in self.types if name not in record] if new else []
        for key in new:
            if not isinstance(key, str):
                raise DataError(f"the key {key!r} is not text", where=where, fix="Rename it.")
            if key in (LINE_COLUMN, BAD_COLUMN):
                raise DataError(f"the key {key!r} is reserved", where=where, fix="Rename it.")
            if any("\ud800" <= char <= "\udfff" for char in key):
                problem = f"the key {key!r} contains half of a surrogate pair, which is not a character"
                raise DataError(problem, where=where, fix="Rename it.")
            hint = did_you_mean(key, [name for name in missing if "." not in name]) if "." not in key else None
            if hint is not None or len(self.types) >= MOST_KEYS:
                problem = f"keys differ from those before: with {key!r}, without {', '.join(map(repr, missing))}"
                raise DataError(problem, where=where, fix=hint or "Write the same keys in every record.")
            self.types[key], self._since[key] = pa.null(), number

    def _array(self, name: str, values: list[Any], numbers: Sequence[int]) -> Any:
        """Return the values as an array and widen the type of the column; refuse a value that fits no type."""
        try:
            array, kind = _fit(values, self.types[name])
        except _UNFIT as error:
            if len(values) == 1:
                raise self._misfit(name, values[0], numbers[0], error) from None
            for value, number in zip(values, numbers, strict=True):  # the first one that does not fit raises
                self._array(name, [value], [number])
            where = f"{self.origin}:{numbers[0]}:{name}"
            raise DataError("its values do not fit one type", where=where, fix=_ONE_TYPE) from None
        if kind != self.types[name]:
            self.types[name] = kind
            self._since[name] = next(n for value, n in zip(values, numbers, strict=True) if value is not None)
        return array

    def _misfit(self, name: str, value: Any, number: int, error: Exception) -> DataError:
        """Return the error for a value that does not fit the values before it."""
        import pyarrow as pa

        reason = "a list of mixed values" if isinstance(value, list) else short_text(error)
        if isinstance(error, OverflowError):
            reason = "a number of more than 64 bits"
        elif isinstance(error, UnicodeError):
            reason = "half of a surrogate pair, which is not a character"
        with suppress(*_UNFIT):
            here, before = _say(pa.array([value]).type), _say(self.types[name])
            if before not in (here, "null"):
                reason = f"{here} here, {before} in {'line' if self.lines else 'row'} {self._since[name]}"
        return DataError(reason, where=f"{self.origin}:{number}:{name}", fix=_ONE_TYPE)


def _fit(values: list[Any], known: Any) -> tuple[Any, Any]:
    """Return the values as an array of the type that includes them and the known type, and that type."""
    import pyarrow as pa

    array = pa.array(values)
    numbers = pa.types.is_list(array.type) and pa.types.is_floating(array.type.value_type)
    if numbers and any(isinstance(item, bool) for cell in values for item in cell or ()):
        raise TypeError("pyarrow would write true as 1.0")
    schemas = [pa.schema({"column": kind}) for kind in (known, array.type)]
    kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return array.cast(kind), kind


def _say(kind: Any) -> str:
    """Return a name for an Arrow type."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        inner = _say(kind.value_type)
        return f"a list of {inner[2:]}s" if inner.endswith("number") else f"a list of {inner}"
    words = {"null": "null", "bool": "true/false", "int64": "a whole number", "double": "a number", "string": "text"}
    return words.get(str(kind), str(kind))
