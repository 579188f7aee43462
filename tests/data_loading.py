"""Read data with the options of a run as keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.config.load import Entry, resolve
from tunesmith.config.options import RunConfig
from tunesmith.data import read
from tunesmith.data.read import DataBundle


def make_config(**options: Any) -> RunConfig:
    """Return the config of these options, converted as on the command line."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    found = resolve(Entry(name, value, f"--{name}") for name, value in plain.items())
    assert not found.problems
    return RunConfig(**found.values)


def load_data(*, head_names: Sequence[str] = (), on_progress: Any = None, **options: Any) -> DataBundle:
    """Load data; `train_data`, `validation_data` and `test_data` are rows in memory, the rest are options."""
    data = {split: options.pop(f"{split}_data", None) for split in ("train", "validation", "test")}
    return read.load_data(make_config(**options), data, head_names=head_names, on_progress=on_progress)
