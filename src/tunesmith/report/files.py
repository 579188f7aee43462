"""The config of a run folder, which may be absent: a report says what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tunesmith.config.entries import read_entries
from tunesmith.config.load import resolve


def read_config(path: Path) -> dict[str, Any]:
    """The options in a run.yaml, each in its type; empty when the file is absent. Options of other versions are left out."""
    return resolve(read_entries(path).entries).values if os.path.lexists(path) else {}
