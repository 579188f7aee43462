"""Read data with the options of a run as keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.config.options import RunConfig
from tunesmith.data import read
from tunesmith.data.read import DataBundle


def load_data(*, head_names: Sequence[str] = (), on_progress: Any = None, **options: Any) -> DataBundle:
    """Load data; `train_data`, `validation_data` and `test_data` are rows in memory, the rest are options."""
    data = {split: options.pop(f"{split}_data", None) for split in ("train", "validation", "test")}
    return read.load_data(RunConfig(**options), data, head_names=head_names, on_progress=on_progress)
