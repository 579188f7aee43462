"""How runs are made on purpose for bench/diagnose_runs.py: the causes at several strengths, their rows and options."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Collection, Mapping
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
SEEDS = 3
Key = tuple[str, str, str, int]
"""Model, task, cause, seed."""
LATE = ("stopped_too_early", "underfitting")


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
    spoil: Callable[[Splits, str, random.Random], None] | None = None
    only: Callable[[str], bool] = lambda task: True


def _other(label: Any, task: str, pick: random.Random) -> Any:
    """Another label, drawn at random."""
    if TASKS[task].kind is Task.REGRESSION:
        return pick.choice(read_task(task)["train"])[1]
    names = label_map(task).names
    if TASKS[task].kind is Task.MULTILABEL:
        return tuple(sorted(pick.sample(names, len(label))))
    return pick.choice([name for name in names if name != label])


def _noise(
    share: float, parts: tuple[str, ...] = ("train", "validation")
) -> Callable[[Splits, str, random.Random], None]:
    """So many labels of training and validation rows are replaced by others."""

    def spoil(splits: Splits, task: str, pick: random.Random) -> None:
        for split in parts:
            rows = splits[split]
            splits[split] = [(t, _other(label, task, pick) if pick.random() < share else label) for t, label in rows]

    return spoil


def _shuffled(splits: Splits, task: str, pick: random.Random) -> None:
    for split in ("train", "validation"):
        labels = [label for _, label in splits[split]]
        pick.shuffle(labels)
        splits[split] = [(texts, label) for (texts, _), label in zip(splits[split], labels, strict=True)]


def _swapped(share: float) -> Callable[[Splits, str, random.Random], None]:
    """The validation rows use other label ids than the training rows, a share of them or all."""

    def spoil(splits: Splits, task: str, pick: random.Random) -> None:
        names = label_map(task).names
        turned = dict(zip(names, (*names[1:], names[0]), strict=True))
        values = [label for _, label in splits["validation"]] if TASKS[task].kind is Task.REGRESSION else []

        def change(label: Any) -> Any:
            if pick.random() >= share:
                return label
            if TASKS[task].kind is Task.REGRESSION:
                return max(values) + min(values) - label
            return tuple(sorted(turned[p] for p in label)) if isinstance(label, tuple) else turned[label]

        splits["validation"] = [(texts, change(label)) for texts, label in splits["validation"]]

    return spoil


def _without_class(splits: Splits, task: str, pick: random.Random) -> None:
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
}
ORDER = (
    *("rate_1e-2", "auto", "auto_shuffled", "short", "few_rows", "frozen", "healthy_10", "noise_40", "swapped", "hf"),
    *("rate_1e-6", "auto_300", "shorter", "swapped_60", "half_learnt", "rate_2e-3", "without_class", "batch_1"),
    *(
        "auto_few_rows",
        "auto_short",
        "auto_rate_1e-2",
        "auto_small",
        "auto_10",
        "shuffled",
        "auto_noise_40",
        "auto_swapped",
    ),
    *(
        "healthy_3",
        "fewer_rows",
        "shuffled_long",
        "noise_40_long",
        "auto_rate_1e-6",
        "auto_3000",
        "noise_20",
        "batch_256",
        "noise_40_train",
        "hf_3000",
    ),
)
"""So that a bank that is stopped early has the most wanted runs."""
MADE_WELL = tuple(name for name, cause in CAUSES.items() if cause.right == ("healthy",))


def name_run(key: Key) -> str:
    """The name of a run."""
    return "-".join(map(str, key))


def list_runs(groups: Collection[str], numbers: Mapping[str, int] | None = None) -> list[Key]:
    """Every run, in the order of making: the usual run of every task, then each cause on half of the tasks, then on the
    other half. Models and seeds by turns, the groups of tasks mixed.

    `numbers`: each of these causes on so many tasks, mixed so that a bank that is stopped early has some of each."""
    tasks = [task.name for task in TASKS.values() if task.group in groups]
    mixed = sorted(tasks, key=lambda name: zlib.crc32(name.encode()))
    if numbers is not None:
        placed = [
            ((place + 0.5) / len(some) * (0.5 if cause == "healthy" else 1.0), key)
            for at, (cause, count) in enumerate(numbers.items())
            for some in (_some(cause, mixed, count, at),)
            for place, key in enumerate(some)
        ]
        return [key for _, key in sorted(placed)]
    found: list[Key] = [
        (MADE_WITH[(place + turn) % 2], t, "healthy", turn) for turn in (0, 1) for place, t in enumerate(mixed)
    ]
    for half in (0, 1):
        for number, cause in enumerate(ORDER):
            for place, task in enumerate(mixed):
                if (number + place) % 2 == half and _fits(cause, task):
                    found.append((_model(number, place), task, cause, (number + place // 2) % SEEDS))
    return found


def _some(cause: str, tasks: list[str], count: int, at: int) -> list[Key]:
    """A cause on so many of the tasks, from another one on for each cause."""
    turned = [tasks[(place + at) % len(tasks)] for place in range(len(tasks))]
    number = ORDER.index(cause) if cause in ORDER else 0
    fitting = [task for task in turned if _fits(cause, task)][:count]
    models = {task: _model(number, 2 * place) for place, task in enumerate(fitting)}
    if cause in COMPARED:  # the model of the task's usual run
        models = {task: MADE_WITH[tasks.index(task) % 2] for task in fitting}
    return [(models[task], task, cause, place % SEEDS) for place, task in enumerate(fitting)]


def _model(number: int, place: int) -> str:
    """By turns; the third one for causes whose harm is not compared with the usual run of a model."""
    alone = ORDER[number] not in COMPARED
    return (
        (MADE_WITH * 2)[(number + place // 2) % (2 * len(MADE_WITH) - 1)]
        if alone
        else MADE_WITH[(number + place // 2) % 2]
    )


COMPARED = ("healthy", "batch_256", "batch_1", "rate_2e-3", "frozen", "half_learnt", "without_class", "auto_short")
"""Causes that do no harm on some tasks, as a comparison with the usual run of the same model and task shows."""


def _fits(cause: str, task: str) -> bool:
    given, small = CAUSES[cause], TASKS[task].rows <= 200
    return given.only(task) and not (small and (given.rows is not None or cause.startswith("noise")))


def make_rows(key: Key) -> Splits:
    """Train, validation and test rows; the test rows are never spoilt."""
    _, task, name, seed = key
    cause, splits = CAUSES[name], dict(read_task(task))
    pick = random.Random(seed)
    train = list(splits["train"])
    pick.shuffle(train)
    usual = TASKS[task].rows
    splits["train"] = train[: (cause.rows or usual) if cause.many else min(cause.rows or usual, usual)]
    if TASKS[task].kind is not Task.REGRESSION:  # every class has a row, so that none is unknown
        seen = {part for _, label in splits["train"] for part in (label if isinstance(label, tuple) else (label,))}
        for name_ in (n for n in label_map(task).names if n not in seen):
            splits["train"].append(
                next(r for r in train if name_ == r[1] or (isinstance(r[1], tuple) and name_ in r[1]))
            )
    splits["validation"] = splits["validation"][: cause.held_out]
    if cause.spoil is not None:
        cause.spoil(splits, task, pick)
    return splits


def make_options(key: Key, rows: int) -> dict[str, Any]:
    """What the command line of a run with so many rows would give; a recipe decides the rest."""
    model, task, name, seed = key
    cause = CAUSES[name]
    given: dict[str, Any] = {
        "model_name_or_path": MODELS[model],
        "max_seq_length": TASKS[task].length,
        "freeze": ["encoder"] if cause.frozen else [],
        "seed": seed,
        "recipe": cause.recipe or "hf",
    }
    if cause.exact is not None or not cause.recipe:
        given["learning_rate"] = RATES[model] * cause.rate if cause.exact is None else cause.exact
    epochs = cause.epochs or 3.0
    if cause.recipe and cause.epochs is not None:
        given["num_train_epochs"] = epochs
    if not cause.recipe:
        given |= {"num_train_epochs": epochs, "per_device_train_batch_size": cause.batch}
        if cause.right == ("healthy",):  # a run without a fault has enough steps
            given["num_train_epochs"] = float(min(10, max(epochs, -(-FEWEST_STEPS * cause.batch // rows))))
    return given | ({"load_best_model_at_end": False} if not cause.recipe else {})


FEWEST_STEPS = 120
