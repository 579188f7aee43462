"""Pages of mapped files are given back, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from tunesmith.data.cache import release_pages

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps")


def mapped_bytes(name: str) -> int:
    """How much of the mappings of this file is resident, from smaps."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            inside = line.endswith(name)
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def test_pages_that_were_read_are_given_back_and_read_again_as_they_were(tmp_path: Path) -> None:
    numbers = np.arange(2_000_000)
    Dataset.from_dict({"n": numbers}).save_to_disk(tmp_path / "saved")
    dataset = Dataset.load_from_disk(tmp_path / "saved")
    file = dataset.cache_files[0]["filename"]
    assert np.array_equal(dataset.data.column("n").to_numpy(), numbers)
    assert mapped_bytes(file) > 8_000_000
    assert release_pages(dataset) > 8_000_000
    assert mapped_bytes(file) < 1_000_000
    assert np.array_equal(dataset.data.column("n").to_numpy(), numbers)


def test_rows_that_live_in_memory_are_left_alone() -> None:
    dataset = Dataset.from_dict({"n": list(range(1000))})
    assert release_pages(dataset) == 0
    assert dataset["n"][:] == list(range(1000))
