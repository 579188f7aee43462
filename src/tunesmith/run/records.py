"""The JSON files of a run folder, each of which may be absent: what they hold, every known value of its type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError
from tunesmith.files import BadFile, read_json

COUNTS = {str: int}
SUMMARY: dict[str, Any] = {
    "task": str,
    "labels": [str],
    "columns": {str: Any},
    "rows": COUNTS,
    "label_counts": {str: COUNTS},
    "truncation": {str: {"rows": int, "rows_cut": int, "tokens_cut": int, "max_length": int}},
    "notes": [str],
    "findings": [{str: Any}],
    "recipe": [str],
    "floors": {str: {str: {str: Any}}},
}
ENVIRONMENT: dict[str, Any] = {"run_id": str, "folder": str, "command": [str], "packages": {str: Any}}
_WORDS = {str: "a text", int: "a whole number from 0", list: "a list", dict: "an object"}


def read_summary(file: Path) -> dict[str, Any]:
    """data_summary.json; empty when it is absent."""
    return _read(file, SUMMARY)


def read_environment(file: Path) -> dict[str, Any]:
    """environment.json; empty when it is absent."""
    return _read(file, ENVIRONMENT)


def read_metrics(file: Path) -> dict[str, Any]:
    """metrics.json, ours or one of another tool; empty when it is absent."""
    return _read(file, {})


def _read(file: Path, shapes: dict[str, Any]) -> dict[str, Any]:
    try:
        data = read_json(file, follow=True)
    except FileNotFoundError:
        return {}
    except BadFile as error:
        raise _damage(file, str(error)) from None
    if not isinstance(data, dict):
        raise _damage(file, "does not hold an object")
    _check(file, "", data, shapes)
    return data


def _check(file: Path, name: str, value: Any, shape: Any) -> None:
    """`shape`: a type, a list of one shape, a dict of `str` to the shape of every value, or of names to shapes."""
    if shape is Any:
        return
    kind: Any = shape if isinstance(shape, type) else type(shape)
    good = isinstance(value, kind) and not isinstance(value, bool) and not (kind is int and value < 0)
    if not good:
        raise _damage(file, f"{name} is {str(value)[:40]!r}, not {_WORDS[kind]}")
    if isinstance(shape, list):
        for one in value:
            _check(file, name, one, shape[0])
    elif isinstance(shape, dict):
        for key, one in value.items():
            known = shape.get(str, shape.get(key, Any))
            if one is not None or str in shape:
                _check(file, f"{name}.{key[:40]}".removeprefix("."), one, known)


def _damage(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(problem, where=str(file), fix="Restore it from a copy, or delete it.")
