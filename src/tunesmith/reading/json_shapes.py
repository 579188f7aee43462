"""JSON files that hold one object with all rows inside: refused with the command that writes them as one object a line."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from tunesmith.errors import DataError
from tunesmith.reading.ready_commands import train_after

_TABLE = re.compile(r'^\s*\{\s*"(?:[^"\\]|\\.)+"\s*:\s*(?:\{\s*"0"\s*:|\[\s*(?:"|-?\d))')
_ROWS = re.compile(r'"((?:[^"\\]|\\.)+)"\s*:\s*\[\s*\{')
_COLUMNS = "import pandas, sys; pandas.read_json(sys.argv[1]).to_json(sys.stdout, orient='records', lines=True)"
_LIST = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))[{key!r}]]"


def refuse_one_object(head: str, origin: str) -> None:
    """Refuses columns as pandas writes them by default, and a list of rows under a key such as "data"."""
    if not head.lstrip().startswith("{") or _is_lines(head):
        return
    found = _ROWS.search(head)
    if _TABLE.match(head):
        problem, code = "one object with a key for each column, not a row for each line", _COLUMNS
    elif found is not None:
        key = json.loads(f'"{found[1]}"')
        problem, code = f"one object with the rows in its key {key!r}, not a row for each line", _LIST.format(key=key)
    else:
        return
    command = train_after(f"python -c {shlex.quote(code)}", origin, suffix=".jsonl")
    raise DataError(problem, where=f"{origin}:1", fix=f"Write it as JSON lines: {command}")


def _is_lines(head: str) -> bool:
    """Whether the first line is a whole object and the next one starts another."""
    lines = [line for line in head.split("\n") if line.strip()][:2]
    try:
        return len(lines) == 2 and lines[1].lstrip().startswith("{") and isinstance(json.loads(lines[0]), dict)
    except ValueError:
        return False


def describe_leaves(cell: str) -> tuple[str, str] | None:
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
