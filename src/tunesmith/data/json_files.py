"""JSON lines, JSON files that hold one array of objects, and fastText lines, `__label__NAME text`.

Rules. One object a line; empty lines only at the end. A key twice, NaN, Infinity, a number too large for a float, nesting deeper
than 64 and half a surrogate pair are refused with their line. A `.json` file that starts with `[` is read whole, so its size
is limited; one that starts with `{` is read as lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NoReturn

from tunesmith.data.blocks import UnreadableText
from tunesmith.data.json_rows import ColumnKinds, Widened
from tunesmith.data.text_files import FASTTEXT_MARK
from tunesmith.errors import DataError

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
