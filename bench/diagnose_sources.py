"""Where the tasks of bench/diagnose_runs.py come from: the seven data sets of ../shared, read without `datasets`."""

from __future__ import annotations

import csv
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tunesmith.labels import Task

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
Row = tuple[tuple[str, ...], Any]
"""Texts (one, or a pair) and the label: a class name, a number, or a tuple of class names."""
Rows = list[Row]
Splits = dict[str, Rows]
Group = Literal[
    "choose", "report", "last", "fresh", "outside", "outside_choose", "outside_first", "outside_last", "sealed"
]
"""The first four are of ../shared, the others are not. A model may be fitted to all of them but the last,
which is looked at once."""
GROUPS: tuple[Group, ...] = (
    "choose",
    "report",
    "last",
    "fresh",
    "outside",
    "outside_choose",
    "outside_first",
    "outside_last",
    "sealed",
)
HELD_OUT = 400


@dataclass(frozen=True)
class BankTask:
    """One task. `length`: the most tokens of a row."""

    name: str
    group: Group
    kind: Task
    read: Callable[[], Splits]
    rows: int = 1200
    length: int = 64
    most_held_out: int = 500
    """Validation rows."""


@cache
def _table(path: str) -> tuple[dict[str, str], ...]:
    with open(SHARED / "data" / path, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def plain(folder: str, texts: tuple[str, ...] = ("text",), label: str = "label", suffix: str = "") -> Splits:
    """The rows of a data set; a validation split is taken from train where there is none."""
    found: Splits = {}
    for split in ("train", "validation", "test"):
        file = f"{folder}/{split}{suffix}.tsv"
        if (SHARED / "data" / file).exists():
            found[split] = [(tuple(row[t] for t in texts), row[label]) for row in _table(file)]
    pick = random.Random(1)
    pick.shuffle(found["train"])
    if "validation" not in found:
        found["validation"], found["train"] = found["train"][:HELD_OUT], found["train"][HELD_OUT:]
    return found


def mapped(splits: Splits, change: Callable[[Row], Row | None]) -> Splits:
    """The rows as `change` makes them; those that it makes None are left out."""
    return {split: [new for row in rows if (new := change(row)) is not None] for split, rows in splits.items()}


def numbers(splits: Splits) -> Splits:
    """A regression: the labels as numbers."""
    return mapped(splits, lambda row: (row[0], float(row[1])))


def words_of(row: Row) -> list[str]:
    """The words of a row's texts in lower case."""
    return re.findall(r"\w+", " ".join(row[0]).lower())


def frequent_words(rows: Rows, skip: int, count: int) -> tuple[str, ...]:
    """So many words by the number of rows that have them, after the first `skip`; equal numbers by the alphabet."""
    found: dict[str, int] = {}
    for row in rows:
        for word in set(words_of(row)):
            if len(word) > 2:
                found[word] = found.get(word, 0) + 1
    return tuple(sorted(found, key=lambda word: (-found[word], word))[skip : skip + count])
