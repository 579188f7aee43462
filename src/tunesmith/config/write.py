"""RunConfig -> YAML text that `load_config` reads back as an equal config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunesmith.config.schema import RunConfig, list_options


def dump_config(config: RunConfig, *, only: Iterable[str] | None = None, header: str = "") -> str:
    """The config as YAML: one line an option, its help above it, a title for each section. `only` limits it to some options."""
    wanted = set(list_options()) if only is None else set(only)
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    group = None
    for option in list_options().values():
        if option.name not in wanted:
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# --- {group} ---"]
        lines += [f"# {option.help}", f"{option.name}: {dump_value(getattr(config, option.name))}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def dump_value(value: Any) -> str:
    """One value as YAML on one line. Text is always quoted, so that no reader takes it for something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(dump_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quote(str(k))}: {dump_value(v)}" for k, v in value.items()) + "}"
    return _quote(value) if isinstance(value, str) else repr(value)


def _quote(text: str) -> str:
    return '"' + "".join(_escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char == "\t":
        return "\\t"
    if char == "\n":
        return "\\n"
    if char.isprintable() and char != "\ufeff":
        return char
    return f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else f"\\u{ord(char):04x}"
