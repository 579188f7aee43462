"""File and flags -> RunConfig. Flags go over the file, the file over the defaults; all problems are reported at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.check import DATA_SOURCES, find_problems
from tunesmith.config.convert import convert
from tunesmith.config.entries import Entry, read_entries
from tunesmith.config.old_names import rename, suggest
from tunesmith.config.schema import RunConfig, list_options
from tunesmith.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """Converted values by name, where each came from, the notes about old names, and every problem."""

    values: dict[str, Any]
    wheres: dict[str, str]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def load_config(
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    need_data: bool = True,
    start: RunConfig | None = None,
) -> RunConfig:
    """The checked config. `flags` holds names with text or values; `start` takes the place of the defaults.

    Notes about old names go to the log. A ConfigError carries all problems, each with its file:line:column or flag.
    `need_data=False` leaves out the question where the training rows come from.
    """
    problems: list[str] = []
    from_file = read_entries(file) if file is not None else None
    resolved = resolve(from_file.entries if from_file else ())
    given = resolve(Entry(name, value, f"--{name}") for name, value in (flags or {}).items())
    problems += (*(from_file.problems if from_file else ()), *resolved.problems, *given.problems)
    for note in (*resolved.notes, *given.notes):
        logger.warning("%s", note)
    values = {**resolved.values, **given.values}
    wheres = {**resolved.wheres, **given.wheres}
    known = {name: getattr(start, name) for name in list_options()} if start is not None else {}
    config = RunConfig(**{**known, **values})
    # A misspelt or wrong source is already told; "no training rows" beside it would only confuse.
    told = any(name in problem for problem in problems for name in DATA_SOURCES)
    problems += find_problems(config, need_data=need_data and not told, wheres=wheres)
    raise_problems(problems)
    return config


def resolve(entries: Iterable[Entry]) -> Resolved:
    """Old names renamed, every value in the type of its option."""
    values: dict[str, Any] = {}
    wheres: dict[str, str] = {}
    notes: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            renamed = rename(entry.name, entry.value)
            if renamed.note is not None:
                notes.append(f"{_start(entry)} {renamed.note}")
            if renamed.name is None:
                continue
            value = _convert(renamed.name, renamed.value)
        except ValueError as error:
            problems.append(_line(entry, str(error)))
            continue
        if renamed.name in values:
            problems.append(
                f"{entry.where}: {renamed.name} is already given at {wheres[renamed.name]}. Keep one of them"
            )
        values[renamed.name] = value
        wheres[renamed.name] = entry.where
    return Resolved(values, wheres, tuple(notes), tuple(problems))


def raise_problems(problems: Iterable[str]) -> None:
    """A ConfigError with all problems, or nothing when there are none."""
    found = tuple(dict.fromkeys(problems))
    if len(found) == 1:
        raise ConfigError(found[0], problems=found)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ConfigError(f"{len(found)} problems in the configuration:\n{lines}", problems=found)


def _convert(name: str, value: Any) -> Any:
    option = list_options().get(name)
    if option is None:
        hint = suggest(name, tuple(list_options()))
        raise ValueError(f"unknown option{f'. {hint}' if hint else '. `tunesmith train --help` lists all'}")
    return convert(value, option.hint)


def _line(entry: Entry, problem: str) -> str:
    return f"{_start(entry)}: {problem}"


def _start(entry: Entry) -> str:
    """Where and name; a flag is its own place and name."""
    return entry.where if entry.where.startswith("--") else f"{entry.where}: {entry.name}"
