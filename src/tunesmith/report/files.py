"""The files of a run folder, each of which may be absent: a report says what is there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError

log = logging.getLogger(__name__)


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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty when the file is absent. Damage is a DataError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise DataError(f"is not YAML ({reason})", where=str(path), fix="Write it again or delete it.") from None
    return data if isinstance(data, dict) else {}
