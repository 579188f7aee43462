"""The embedded sample: a paraphrase set written for this project (CC0), see README.md in this folder."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import DataError

SPLITS = ("train", "validation", "test")


def sample_file(split: str) -> Path:
    """Return the path of the csv file of one split: "train", "validation" or "test"."""
    if split not in SPLITS:
        raise DataError(f"the sample data has no split {split!r}", fix=f"Use one of {', '.join(SPLITS)}.")
    return Path(__file__).resolve().parent / f"{split}.csv"
