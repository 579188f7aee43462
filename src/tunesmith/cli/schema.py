"""Print the JSON schema of the config file, for editors that complete and check it."""

from __future__ import annotations

import argparse
import json

from tunesmith.config.schema import dump_value, list_options, make_json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but --markdown."""
    parser.add_argument("--markdown", action="store_true", help="Print a table of all options for the documentation.")


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
