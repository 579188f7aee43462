"""Config files as entries: name, value as written, and its place in the file. Only text, lists and mappings are constructed.

PyYAML's safe loader reads `1e-5` as a string, `no` as False, `0123` as 83, and keeps the last of two equal keys. Here the nodes
of the parser become text, lists and mappings, each key with its line and column; anchors and tags are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.errors import ConfigError
from tunesmith.files import BadFile, read_plain

MAX_BYTES = 1_000_000
"""A config larger than this is not a config."""

MAX_ENTRIES = 500
"""More names than this are not options. Without the limit 60,000 unknown names took 30 s to compare with the known ones."""

MAX_DEPTH = 4
"""Options hold a value, a list or a flat mapping: deeper nesting is a mistake or an attack."""


@dataclass(frozen=True)
class Entry:
    """`where` is `file:line:column` or the flag as given."""

    name: str
    value: Any
    where: str


@dataclass(frozen=True)
class FileEntries:
    """The entries of a file, and the problems found while reading it."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_entries(path: str | Path) -> FileEntries:
    """The top-level entries of a YAML, JSON or TOML file, by its suffix. A file that cannot be read at all is a ConfigError."""
    readers: dict[str, Callable[[str, str], FileEntries]] = {
        ".yaml": read_top_level,
        ".yml": read_top_level,
        ".json": _read_json,
        ".toml": _read_toml,
    }
    path = Path(path)
    reader = readers.get(path.suffix.lower())
    if reader is None:
        fix = f"Data goes in with --train_file {path}"
        raise ConfigError("is not a config file (.yaml, .json, .toml)", where=str(path), fix=fix)
    return reader(_read_text(path), str(path))


def refuse_more(count: int, file: str) -> None:
    """A ConfigError when a file holds more names than a config can have."""
    if count > MAX_ENTRIES:
        raise ConfigError(f"holds more than {MAX_ENTRIES} names", where=file, fix="Is it a data file?")


def _read_text(path: Path) -> str:
    try:
        content = read_plain(path, MAX_BYTES, follow=True)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the config: {error.strerror}", where=str(path), fix="Check the path") from None
    except BadFile as error:
        fix = "Is it a data file?" if path.is_file() else "Give a config file."
        raise ConfigError(str(error), where=str(path), fix=fix) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8 text", where=f"{path}:{line}", fix="Save it as UTF-8") from None


def _read_toml(text: str, file: str) -> FileEntries:
    import tomllib

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).partition(" (at ")
        line, column = re.findall(r"\d+", place) or ("end", "1")
        raise ConfigError(f"is not TOML: {reason}", where=f"{file}:{line}:{column}") from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=file) from None
    refuse_more(len(values), file)
    entries = []
    for name, value in values.items():
        key = re.escape(name)
        found = re.search(rf"^[ \t]*(\[?)[ \t]*([\"']?){key}\2[ \t]*[=.\]]", text, re.MULTILINE)
        at = found.start(2) if found else 0
        entries.append(Entry(name, value, f"{file}:{_place(text, at)}"))
    return FileEntries(tuple(entries), ())


def _read_json(text: str, file: str) -> FileEntries:
    """The position of a key is found by a search behind the key before it, because `json` does not report positions."""
    if not text.lstrip(" \t\r\n").startswith("{"):
        fix = "If it holds data rows, give it as --train_file" if text.lstrip().startswith("[") else None
        raise ConfigError("is not a JSON object of option names and values", where=file, fix=fix)
    try:
        pairs = json.loads(text, object_pairs_hook=tuple, parse_constant=_NotANumber)
    except json.JSONDecodeError as error:
        comma = text[: error.pos].rstrip().endswith(",") and text[error.pos : error.pos + 1] == "}"
        reason = "Nothing follows the last comma" if comma else error.msg
        raise ConfigError(f"is not JSON: {reason}", where=f"{file}:{error.lineno}:{error.colno}") from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=file) from None
    refuse_more(len(pairs), file)
    problems: list[str] = []
    entries: dict[str, Entry] = {}
    at = 0
    for name, value in pairs:
        spelt = "|".join(re.escape(json.dumps(name, ensure_ascii=escaped)) for escaped in (False, True))
        found = re.compile(rf"(?:{spelt})\s*:\s*").search(text, at)
        start, at = found.span() if found is not None else (at, at)
        where = f"{file}:{_place(text, start)}"
        try:
            plain = _without_pairs(value)
        except ValueError as error:
            raise ConfigError(f"is not JSON: {error}", where=f"{file}:{_place(text, at)}") from None
        if re.search("[\ud800-\udfff]", json.dumps([name, plain], ensure_ascii=False)):
            raise ConfigError("holds half of a surrogate pair, which is not a character", where=where)
        if name in entries:
            problems.append(f"{where}: {name} is given twice. Keep one of them")
        entries[name] = Entry(name, plain, where)
    return FileEntries(tuple(entries.values()), tuple(problems))


@dataclass(frozen=True)
class _NotANumber:
    """NaN or Infinity, which Python's json accepts and JSON does not have."""

    word: str


def _without_pairs(value: Any) -> Any:
    """The value with a dict in place of each tuple of pairs; a name that occurs twice in one is a ValueError."""
    if isinstance(value, _NotANumber):
        raise ValueError(f"{value.word} is not a number")
    if isinstance(value, list):
        return [_without_pairs(item) for item in value]
    if not isinstance(value, tuple):
        return value
    names = [name for name, _ in value]
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given twice")
    return {name: _without_pairs(item) for name, item in value}


def _place(text: str, at: int) -> str:
    line_start = text.rfind("\n", 0, at) + 1
    return f"{text.count(chr(10), 0, at) + 1}:{at - line_start + 1}"


_NULLS = ("", "~", "null", "Null", "NULL")


def read_top_level(text: str, file: str) -> FileEntries:
    """The entries of the mapping in a YAML file. Values stay as they are written: tags and anchors are never interpreted."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), file, yaml)
        top = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        where = f"{file}:{_mark(error.problem_mark)}" if error.problem_mark else file
        raise ConfigError(f"is not YAML: {error.problem}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {str(error).splitlines()[0]}", where=file) from None
    if top is None or (isinstance(top, yaml.ScalarNode) and _as_written(top) is None):
        return FileEntries((), ())
    if not isinstance(top, yaml.MappingNode):
        _refuse(top, file, "expected option names and values, such as `learning_rate: 2e-5`")
    problems: list[str] = []
    entries = _pairs(top, file, problems)
    return FileEntries(tuple(entries.values()), tuple(problems))


def _check_events(events: Iterable[Any], file: str, yaml: Any) -> None:
    """Refuses what a config does not need, before values are built: anchors, tags, deep nesting, a second document."""
    depth = documents = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            _refuse(event, file, "anchors and aliases are not accepted", fix="Write the value out")
        if getattr(event, "tag", None) is not None:
            _refuse(event, file, f"the tag {event.tag!r} is not accepted", fix="Write the plain value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            _refuse(event, file, "is nested too deeply")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise ConfigError("holds more than one YAML document", where=file, fix="Keep one")


def _pairs(mapping: Any, file: str, problems: list[str]) -> dict[str, Entry]:
    refuse_more(len(mapping.value), file)
    entries: dict[str, Entry] = {}
    for key, value in mapping.value:
        if key.id != "scalar":
            _refuse(key, file, "a name must be plain text")
        where = f"{file}:{_mark(key.start_mark)}"
        if key.value in entries:
            before = entries[key.value].where
            problems.append(f"{where}: {key.value} is given twice, first at {before}. Keep one of them")
        entries[key.value] = Entry(key.value, _value(value, file, problems), where)
    return entries


def _value(node: Any, file: str, problems: list[str]) -> Any:
    if node.id == "mapping":
        return {name: entry.value for name, entry in _pairs(node, file, problems).items()}
    return [_value(item, file, problems) for item in node.value] if node.id == "sequence" else _as_written(node)


def _as_written(scalar: Any) -> str | None:
    """The text of a scalar; None for a null without quotes."""
    return None if not scalar.style and scalar.value in _NULLS else str(scalar.value)


def _refuse(at: Any, file: str, problem: str, *, fix: str | None = None) -> NoReturn:
    raise ConfigError(problem, where=f"{file}:{_mark(at.start_mark)}", fix=fix)


def _mark(mark: Any) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"
