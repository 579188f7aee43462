"""How runs are made on purpose for bench/diagnose_runs.py: the causes at several strengths, their rows and options."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diagnose_sources import Rows, Splits
from diagnose_tasks import TASKS, label_map, read_task
from tunesmith.labels import Task

MODELS = {
    "L3": "paraphrase-MiniLM-L3-v2",
    "G": "granite-embedding-30m-english",
    "G3": "granite-3-layers",
    "L6": "all-MiniLM-L6-v2",
}
"""The third is the second without its upper three layers (bench/diagnose_pack.py makes it)."""
MADE_WITH = tuple(os.environ.get("BANK_MODELS", "L3,G,G3").split(","))
"""The models of a bank, the first two for causes whose harm is compared with the usual run."""
RATES = {"L3": 1e-4, "G": 6e-5, "G3": 1e-4, "L6": 6e-5}
"""Encoders of 3 and 6 layers want more than the 5e-5 of base-size ones."""
Key = tuple[str, str, str, int]
"""Model, task, cause, seed."""
LATE = ("stopped_too_early", "underfitting")
Spoil = Callable[[Splits, str, random.Random, float], None]
"""Changes the labels; the number is what the cause's share is multiplied by."""


@dataclass(frozen=True)
class Cause:
    """One way to run. `right`: first verdicts that name the cause. `rate`: times the usual one, unless `exact`."""

    right: tuple[str, ...]
    rate: float = 1.0
    exact: float | None = None
    epochs: float | None = None
    """None: three, or what the recipe decides."""
    rows: int | None = None
    held_out: int | None = None
    """At most so many validation rows."""
    many: bool = False
    """More rows than the task has otherwise, as far as there are any."""
    recipe: str = ""
    """"auto" or "hf": the options that `tunesmith train --recipe` would choose; else those of this bank."""
    evaluations: int = 1
    """In an epoch."""
    batch: int = 16
    frozen: bool = False
    spoil: Spoil | None = None
    only: Callable[[str], bool] = lambda task: True


def _other(label: Any, task: str, pick: random.Random) -> Any:
    """Another label, drawn at random."""
    if TASKS[task].kind is Task.REGRESSION:
        return pick.choice(read_task(task)["train"])[1]
    names = label_map(task).names
    if TASKS[task].kind is Task.MULTILABEL:
        return tuple(sorted(pick.sample(names, len(label))))
    return pick.choice([name for name in names if name != label])


def _noise(share: float, parts: tuple[str, ...] = ("train", "validation")) -> Spoil:
    """So many labels of training and validation rows are replaced by others."""

    def spoil(splits: Splits, task: str, pick: random.Random, times: float) -> None:
        for split in parts:
            rows = splits[split]
            wrong = [pick.random() < share * times for _ in rows]
            splits[split] = [(t, _other(v, task, pick) if w else v) for (t, v), w in zip(rows, wrong, strict=True)]

    return spoil


def _shuffled(splits: Splits, task: str, pick: random.Random, times: float) -> None:
    for split in ("train", "validation"):
        labels = [label for _, label in splits[split]]
        pick.shuffle(labels)
        splits[split] = [(texts, label) for (texts, _), label in zip(splits[split], labels, strict=True)]


def _swapped(share: float) -> Spoil:
    """The validation rows use other label ids than the training rows, a share of them or all."""

    def spoil(splits: Splits, task: str, pick: random.Random, times: float) -> None:
        names = label_map(task).names
        turned = dict(zip(names, (*names[1:], names[0]), strict=True))
        values = [label for _, label in splits["validation"]] if TASKS[task].kind is Task.REGRESSION else []

        def change(label: Any) -> Any:
            if pick.random() >= share * times:
                return label
            if TASKS[task].kind is Task.REGRESSION:
                return max(values) + min(values) - label
            return tuple(sorted(turned[p] for p in label)) if isinstance(label, tuple) else turned[label]

        splits["validation"] = [(texts, change(label)) for texts, label in splits["validation"]]

    return spoil


def _without_class(splits: Splits, task: str, pick: random.Random, times: float) -> None:
    """Of one class (not the largest, not the smallest) one training row in 40 is left."""
    counts: dict[Any, int] = {}
    for _, label in splits["validation"]:
        counts[label] = counts.get(label, 0) + 1
    name = sorted(counts, key=counts.__getitem__)[-2]
    left: Rows = [row for row in splits["train"] if row[1] == name]
    splits["train"] = [row for row in splits["train"] if row[1] != name] + left[: max(2, len(left) // 40)]
    pick.shuffle(splits["train"])


def _has_classes(task: str) -> bool:
    return TASKS[task].kind is Task.MULTICLASS and len(label_map(task)) <= 12


RISEN = ("overfitting", "calibration_drift")
CAUSES = {
    "healthy": Cause(("healthy",)),
    "healthy_3": Cause(("healthy",), evaluations=3),
    "healthy_10": Cause(("healthy",), evaluations=10),
    "auto": Cause(("healthy",), recipe="auto"),
    "auto_300": Cause(("healthy",), recipe="auto", rows=300),
    "auto_10": Cause(("healthy",), recipe="auto", rows=600, evaluations=10),
    "auto_small": Cause(("healthy",), recipe="auto", rows=300, held_out=50),
    "auto_3000": Cause(("healthy",), recipe="auto", rows=3000, many=True),
    "hf": Cause(("healthy",), recipe="hf"),
    "hf_3000": Cause(("healthy",), recipe="hf", rows=3000, many=True, evaluations=4),
    "rate_1e-2": Cause(("diverged",), exact=1e-2, evaluations=2),
    "auto_rate_1e-2": Cause(("diverged",), exact=1e-2, recipe="auto"),
    "rate_2e-3": Cause(("diverged", "erratic"), exact=2e-3, evaluations=2),
    "rate_1e-6": Cause(("underfitting",), exact=1e-6),
    "auto_rate_1e-6": Cause(("underfitting",), exact=1e-6, recipe="auto"),
    "short": Cause(LATE, exact=1e-5, epochs=1, rows=400, evaluations=4),
    "shorter": Cause(LATE, exact=1e-5, epochs=1, rows=240, evaluations=1),
    "auto_short": Cause(LATE, exact=1e-5, epochs=1, rows=400, recipe="auto"),
    "half_learnt": Cause(LATE, rate=0.3, epochs=1, rows=600, evaluations=4),
    "frozen": Cause(("underfitting",), frozen=True),
    "few_rows": Cause(RISEN, rate=1.0, epochs=20, rows=240),
    "fewer_rows": Cause(RISEN, rate=1.5, epochs=30, rows=100),
    "auto_few_rows": Cause(RISEN, epochs=20, rows=240, recipe="auto"),
    "shuffled": Cause(("no_signal",), spoil=_shuffled),
    "shuffled_long": Cause(("no_signal",), spoil=_shuffled, epochs=8),
    "auto_shuffled": Cause(("no_signal",), spoil=_shuffled, recipe="auto"),
    "noise_20": Cause(("label_noise",), spoil=_noise(0.2)),
    "noise_40": Cause(("label_noise",), spoil=_noise(0.4)),
    "noise_40_long": Cause(("label_noise",), spoil=_noise(0.4), epochs=8),
    "auto_noise_40": Cause(("label_noise",), spoil=_noise(0.4), recipe="auto"),
    "swapped": Cause(("split_mismatch",), spoil=_swapped(1.0)),
    "swapped_60": Cause(("split_mismatch",), spoil=_swapped(0.6), evaluations=2),
    "auto_swapped": Cause(("split_mismatch",), spoil=_swapped(1.0), recipe="auto"),
    "batch_1": Cause(("erratic", "diverged"), rate=3.0, epochs=2, rows=500, batch=1, evaluations=4),
    "batch_256": Cause(LATE, batch=256),
    "noise_40_train": Cause(("label_noise", "split_mismatch"), spoil=_noise(0.4, ("train",))),
    "without_class": Cause(("class_ignored", "split_mismatch"), spoil=_without_class, only=_has_classes),
    "auto_without_class": Cause(
        ("class_ignored", "split_mismatch"), spoil=_without_class, only=_has_classes, recipe="auto"
    ),
    "auto_rate_2e-3": Cause(("diverged", "erratic"), exact=2e-3, recipe="auto"),
    "hf_frozen": Cause(("underfitting",), frozen=True, recipe="hf"),
}
MADE_WELL = tuple(name for name, cause in CAUSES.items() if cause.right == ("healthy",))


def name_run(key: Key) -> str:
    """The name of a run."""
    return "-".join(map(str, key))


COMPARED = (
    *("healthy", "batch_256", "batch_1", "rate_2e-3", "frozen", "half_learnt", "without_class", "auto_short"),
    *("auto_rate_2e-3", "hf_frozen", "auto_without_class"),
)
"""Causes that do no harm on some tasks, as a comparison with the usual run of the same model and task shows."""


def fits(cause: str, task: str) -> bool:
    """Whether a cause can be made on a task."""
    given, small = CAUSES[cause], TASKS[task].rows <= 200
    return given.only(task) and not (small and (given.rows is not None or cause.startswith("noise")))
