"""Print the JSON schema of the config file, for editors that complete and check it."""

from __future__ import annotations

import argparse
import json
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tunesmith.cli.parser import add_flag
from tunesmith.config.schema import dump_value, list_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but --markdown."""
    add_flag(parser, "--markdown", "Print a table of all options for the documentation.")


def run(args: argparse.Namespace) -> int:
    """Prints the schema."""
    print(options_as_markdown() if args.markdown else json.dumps(make_json_schema(), indent=2, ensure_ascii=False))
    return 0


def options_as_markdown() -> str:
    """Every option with default and help, one table a section."""
    lines: list[str] = []
    group = None
    for option in list_options().values():
        if option.group != group:
            group = option.group
            lines += ["", f"## {group}", "", "| option | default | meaning |", "|---|---|---|"]
        lines.append(
            f"| `{option.name}` | `{dump_value(option.default)}` | {option.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines).strip()


_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    NoneType: {"type": "null"},
    dict: {"type": "object"},
}


def make_json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of the config file."""
    properties = {}
    for option in list_options().values():
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        properties[option.name] = {**_of(option.hint), "description": option.help, "default": default}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tunesmith run config",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _of(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_of(part) for part in get_args(hint)]}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin is tuple:
        # The loader splits text at commas, so one name needs no brackets.
        items = {"type": "array", "items": _of(get_args(hint)[0])}
        return {"anyOf": [items, {"type": "string"}]} if get_args(hint)[0] is str else items
    return dict(_TYPES[origin or hint])
