"""YAML without surprises: scalars stay the text they are written as, nothing is constructed, nothing is expanded.

PyYAML's safe loader reads `1e-5` as a string, `no` as False, `0123` as 83, and keeps the last of two equal keys.
Here the events of the parser become text, lists and mappings, each key with its line and column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from tunesmith.config.entries import MAX_DEPTH, Entry, FileEntries, refuse_more
from tunesmith.errors import ConfigError

_NULLS = ("", "~", "null", "Null", "NULL")


def read_top_level(text: str, file: str) -> FileEntries:
    """The entries of the one mapping a config file is."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(file, yaml)
    try:
        return builder.document(iter(yaml.parse(text, Loader=loader)))
    except yaml.MarkedYAMLError as error:
        where = f"{file}:{_place(error.problem_mark)}" if error.problem_mark else file
        raise ConfigError(f"is not YAML: {error.problem}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {str(error).splitlines()[0]}", where=file) from None


class _Builder:
    """Turns parser events into values. The first thing that is refused ends the reading."""

    def __init__(self, file: str, yaml: Any) -> None:
        self.file = file
        self.yaml = yaml
        self.problems: list[str] = []

    def document(self, events: Iterator[Any]) -> FileEntries:
        """The entries of the first document; a second document is refused."""
        yaml = self.yaml
        event = self._next(events)
        while isinstance(event, (yaml.StreamStartEvent, yaml.DocumentStartEvent)):
            event = self._next(events)
        if isinstance(event, yaml.StreamEndEvent):
            return FileEntries((), ())
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value in _NULLS:
            return FileEntries((), ())
        if not isinstance(event, yaml.MappingStartEvent):
            self._refuse(event, "expected option names and values, such as `learning_rate: 2e-5`")
        entries = self._pairs(events, depth=1)
        self._next(events)
        if isinstance(self._next(events), yaml.DocumentStartEvent):
            raise ConfigError("holds more than one YAML document", where=self.file, fix="Keep one")
        return FileEntries(tuple(entries.values()), tuple(self.problems))

    def _next(self, events: Iterator[Any]) -> Any:
        event = next(events)
        if isinstance(event, self.yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases are not accepted", fix="Write the value out")
        if getattr(event, "tag", None) is not None:
            self._refuse(event, f"the tag {event.tag!r} is not accepted", fix="Write the plain value")
        return event

    def _pairs(self, events: Iterator[Any], depth: int) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        while not isinstance(key := self._next(events), self.yaml.MappingEndEvent):
            if not isinstance(key, self.yaml.ScalarEvent):
                self._refuse(key, "a name must be plain text")
            where = f"{self.file}:{_place(key.start_mark)}"
            if key.value in entries:
                self.problems.append(
                    f"{where}: {key.value} is given twice, first at {entries[key.value].where}. Keep one of them"
                )
            value = self._value(self._next(events), events, depth)
            entries[key.value] = Entry(key.value, value, where)
            refuse_more(len(entries) + len(self.problems), self.file)
        return entries

    def _value(self, event: Any, events: Iterator[Any], depth: int) -> Any:
        if isinstance(event, self.yaml.ScalarEvent):
            return None if event.implicit[0] and event.value in _NULLS else event.value
        if depth >= MAX_DEPTH:
            self._refuse(event, "is nested too deeply")
        if isinstance(event, self.yaml.MappingStartEvent):
            return {name: entry.value for name, entry in self._pairs(events, depth + 1).items()}
        items: list[Any] = []
        while not isinstance(item := self._next(events), self.yaml.SequenceEndEvent):
            items.append(self._value(item, events, depth + 1))
        return items

    def _refuse(self, event: Any, problem: str, *, fix: str | None = None) -> NoReturn:
        raise ConfigError(problem, where=f"{self.file}:{_place(event.start_mark)}", fix=fix)


def _place(mark: Any) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"
