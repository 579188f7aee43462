"""The files of a run folder, each of which may be absent: a report says what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.config.entries import read_entries
from tunesmith.config.load import resolve
from tunesmith.errors import DataError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is absent. Damage is a DataError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", where=str(path), fix="Write it again or delete it.") from None
    return data if isinstance(data, dict) else {}


def read_config(path: Path) -> dict[str, Any]:
    """The options in a run.yaml, each in its type; empty when the file is absent. Options of other versions are left out."""
    return resolve(read_entries(path).entries).values if path.is_file() else {}
