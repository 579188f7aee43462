"""The tasks of bench/diagnose_runs.py: seven data sets of ../shared and nine tasks derived from them, in two halves.

Rules and thresholds are chosen on the tasks of one half (from CR, TREC and SICK) and reported on the other half (from Subj,
MRPC, R8 and news6): no text of one half is in the other.
"""

from __future__ import annotations

import csv
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tunesmith.labels import LabelMap, Task

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
Row = tuple[tuple[str, ...], Any]
"""Texts (one, or a pair) and the label: a class name, a number, or a tuple of class names."""
Rows = list[Row]
Splits = dict[str, Rows]
HELD_OUT = 400


@dataclass(frozen=True)
class BankTask:
    """One task. `chosen`: whether rules may be chosen on it. `length`: the most tokens of a row."""

    name: str
    chosen: bool
    kind: Task
    read: Callable[[], Splits]
    rows: int = 1200
    length: int = 64


@cache
def _table(path: str) -> tuple[dict[str, str], ...]:
    with open(SHARED / "data" / path, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _plain(folder: str, texts: tuple[str, ...] = ("text",), label: str = "label", suffix: str = "") -> Splits:
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


def _mapped(splits: Splits, change: Callable[[Row], Row | None]) -> Splits:
    return {split: [new for row in rows if (new := change(row)) is not None] for split, rows in splits.items()}


def _numbers(splits: Splits) -> Splits:
    return _mapped(splits, lambda row: (row[0], float(row[1])))


def _question_words(row: Row) -> Row:
    """Many classes: the type of a TREC question and its question word."""
    first = row[0][0].split()[0].lower()
    word = first if first in ("what", "who", "how", "where", "when", "which", "why", "name") else "other"
    return row[0], f"{row[1]} {word}"


def _frequent(splits: Splits, least: int) -> Splits:
    """Classes with at least so many training rows."""
    counts: dict[Any, int] = {}
    for _, label in splits["train"]:
        counts[label] = counts.get(label, 0) + 1
    return _mapped(splits, lambda row: row if counts.get(row[1], 0) >= least else None)


def _joined(splits: Splits) -> Splits:
    """Multilabel: two rows joined, with the labels of both."""
    found: Splits = {}
    for split, rows in splits.items():
        halves = zip(rows[::2], rows[1::2], strict=False)
        found[split] = [((f"{a[0][0]} {b[0][0]}",), tuple(sorted({a[1], b[1]}))) for a, b in halves]
    return found


def _is(name: str, splits: Splits, share: float | None = None) -> Splits:
    """Two classes, one against the rest; with `share`, as rare as that."""
    found = _mapped(splits, lambda row: (row[0], "yes" if row[1] == name else "no"))
    if share is None:
        return found
    for split, rows in found.items():
        rest = [row for row in rows if row[1] == "no"]
        few = [row for row in rows if row[1] == "yes"][: round(len(rest) * share / (1 - share))]
        random.Random(2).shuffle(mixed := rest + few)
        found[split] = mixed
    return found


def _overlap(row: Row) -> Row:
    """Regression: the share of words that two sentences have in common."""
    one, other = (set(re.findall(r"\w+", text.lower())) for text in row[0])
    return row[0], 5 * len(one & other) / max(1, len(one | other))


def _opinion(row: Row) -> Row:
    """Regression with noise: subjective or not, and how long the sentence is."""
    noise = random.Random(row[0][0]).gauss(0, 0.3)
    return row[0], (row[1] == "subjective") + 0.5 * math.log(max(2, len(row[0][0].split())) / 20) + noise


def _length_class(row: Row) -> Row:
    return row[0], f"{row[1]} {'long' if len(row[0][0].split()) > 120 else 'short'}"


PAIR = ("premise", "hypothesis")
SENTENCES = ("sentence1", "sentence2")
TASKS = {
    task.name: task
    for task in (
        BankTask("cr", True, Task.BINARY, lambda: _plain("cr")),
        BankTask("trec", True, Task.MULTICLASS, lambda: _plain("trec")),
        BankTask(
            "trec_many", True, Task.MULTICLASS, lambda: _frequent(_mapped(_plain("trec"), _question_words), 25), 2000
        ),
        BankTask("trec_rare", True, Task.BINARY, lambda: _is("4", _plain("trec"), 0.07)),
        BankTask("trec_joined", True, Task.MULTILABEL, lambda: _joined(_plain("trec"))),
        BankTask("sick", True, Task.MULTICLASS, lambda: _plain("sick", PAIR, suffix="_entailment"), 2400),
        BankTask(
            "sick_score",
            True,
            Task.REGRESSION,
            lambda: _numbers(_plain("sick", SENTENCES, "score", "_relatedness")),
            2000,
        ),
        BankTask("cr_tiny", True, Task.BINARY, lambda: _plain("cr"), 200),
        BankTask("subj", False, Task.BINARY, lambda: _plain("subj")),
        BankTask("mrpc", False, Task.BINARY, lambda: _plain("mrpc", SENTENCES), 3000, 96),
        BankTask("r8", False, Task.MULTICLASS, lambda: _plain("r8"), 1200, 96),
        BankTask("news6", False, Task.MULTICLASS, lambda: _plain("news6"), 1000, 160),
        BankTask("news_long", False, Task.MULTICLASS, lambda: _mapped(_plain("news6"), _length_class), 1000, 256),
        BankTask("r8_joined", False, Task.MULTILABEL, lambda: _joined(_plain("r8")), 1500, 160),
        BankTask("r8_rare", False, Task.BINARY, lambda: _is("crude", _plain("r8"), 0.05), 1500, 96),
        BankTask("subj_score", False, Task.REGRESSION, lambda: _mapped(_plain("subj"), _opinion)),
        BankTask(
            "mrpc_overlap", False, Task.REGRESSION, lambda: _mapped(_plain("mrpc", SENTENCES), _overlap), 2000, 96
        ),
    )
}


@cache
def read_task(name: str) -> Splits:
    """Train, validation and test rows, the last two at most 500 and 400."""
    splits = TASKS[name].read()
    return {
        "train": splits["train"],
        "validation": splits["validation"][: 60 if name == "cr_tiny" else 500],
        "test": splits["test"][:HELD_OUT],
    }


def label_map(name: str) -> LabelMap:
    """The classes of a task, by the training rows."""
    task = TASKS[name]
    labels = [label for _, label in read_task(name)["train"]]
    if task.kind is Task.REGRESSION:
        return LabelMap(("score",), task.kind)
    if task.kind is Task.MULTILABEL:
        labels = [part for label in labels for part in label]
    return LabelMap(tuple(sorted(set(labels))), task.kind)
