"""Rows and options of a run of bench/diagnose_runs.py, as its cause says or drawn around that, and the list of a bank."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any

from diagnose_causes import CAUSES, COMPARED, MADE_WITH, MODELS, RATES, Key, fits, name_run
from diagnose_sources import Splits
from diagnose_tasks import TASKS, label_map, read_task
from tunesmith.labels import Task

FEWEST_STEPS = 120
SEEDS = 3
FIRST_DRAWN = 10
"""From this seed on the strengths of a cause are drawn around those of the table: a model that is fitted to the runs cannot know
a cause by one number."""
HELD_OUT = (120, 250, 400, 500)
WELL = "auto:9 auto_300:6 auto_small:4 auto_10:3 healthy:2 healthy_3:4 healthy_10:4 hf:4"
FAULTY = """
    rate_1e-2:2 auto_rate_1e-2:2 rate_2e-3:2 auto_rate_2e-3:1 rate_1e-6:2 auto_rate_1e-6:1
    short:3 shorter:1 auto_short:3 half_learnt:2 frozen:2 hf_frozen:1 batch_1:2 batch_256:2
    few_rows:3 fewer_rows:1 auto_few_rows:3 shuffled:3 shuffled_long:1 auto_shuffled:3
    noise_40:4 noise_40_long:1 auto_noise_40:4 noise_20:1 noise_40_train:3
    swapped:2 swapped_60:3 auto_swapped:3 without_class:2 auto_without_class:2
"""
"""How often each cause stands in a hundred runs."""
TIMES = {name: int(count) for name, count in (part.split(":") for part in f"{WELL} {FAULTY}".split())}


def list_runs(groups: Collection[str], *, drawn: bool, most: int = 2000) -> list[Key]:
    """The usual run of every task, then causes and tasks by turns, each in an order that is shuffled again after all had
    their turn: a bank that is stopped early is balanced."""
    pick = random.Random(1)
    tasks = sorted(task.name for task in TASKS.values() if task.group in groups)
    pick.shuffle(tasks)
    usual = {task: MADE_WITH[place % min(2, len(MADE_WITH))] for place, task in enumerate(tasks)}
    found: list[Key] = [(model, task, "healthy", 0) for task, model in usual.items()]
    causes: list[str] = []
    turns: list[str] = []
    for number in range(most):
        causes = causes or _shuffled(pick, [name for name, count in TIMES.items() for _ in range(count)])
        turns = turns if len(turns) > len(tasks) // 2 else _shuffled(pick, tasks) + turns
        cause = causes.pop()
        task = next((task for task in reversed(turns) if fits(cause, task)), None)
        if task is None:
            continue
        turns.remove(task)
        model = usual[task] if cause in COMPARED else pick.choice(MADE_WITH)
        key = (model, task, cause, FIRST_DRAWN + number if drawn else number % SEEDS)
        if key not in found:
            found.append(key)
    return found


def _shuffled(pick: random.Random, names: list[str]) -> list[str]:
    return pick.sample(names, len(names))


def _times(key: Key, what: str, low: float, high: float) -> float:
    """A factor between both, drawn by the key; 1 for a seed that stands for the table's strengths."""
    share = random.Random(f"{name_run(key)} {what}").random()
    return math.exp(math.log(low) + share * math.log(high / low)) if key[3] >= FIRST_DRAWN else 1.0


def make_rows(key: Key) -> Splits:
    """Train, validation and test rows; the test rows are never spoilt."""
    _, task, name, seed = key
    cause, splits = CAUSES[name], dict(read_task(task))
    pick = random.Random(seed)
    train = list(splits["train"])
    pick.shuffle(train)
    usual = TASKS[task].rows
    wanted = (cause.rows or usual) if cause.many else min(cause.rows or usual, usual)
    if cause.rows is not None:
        wanted = round(wanted * _times(key, "rows", 0.7, 1.4))
    elif name not in COMPARED:  # a comparison is of the same rows
        wanted = round(wanted * _times(key, "rows", 0.5, 1.0))
    splits["train"] = train[:wanted]
    if TASKS[task].kind is not Task.REGRESSION:  # every class has a row, so that none is unknown
        seen = {part for _, label in splits["train"] for part in (label if isinstance(label, tuple) else (label,))}
        for name_ in (n for n in label_map(task).names if n not in seen):
            splits["train"].append(
                next(r for r in train if name_ == r[1] or (isinstance(r[1], tuple) and name_ in r[1]))
            )
    held_out = cause.held_out or (HELD_OUT[seed % len(HELD_OUT)] if seed >= FIRST_DRAWN else None)
    splits["validation"] = splits["validation"][:held_out]
    if cause.spoil is not None:
        cause.spoil(splits, task, pick, _times(key, "share", 0.75, 1.25))
    return splits


def make_options(key: Key, rows: int) -> dict[str, Any]:
    """What the command line of a run with so many rows would give; a recipe decides the rest."""
    model, task, name, seed = key
    cause = CAUSES[name]
    low = 0.8 if cause.right == ("healthy",) else 0.6
    rate, longer = _times(key, "rate", low, 1.6), 1.0 if cause.epochs == 1 else _times(key, "epochs", low, 1.6)
    given: dict[str, Any] = {
        "model_name_or_path": MODELS[model],
        "max_seq_length": TASKS[task].length,
        "freeze": ["encoder"] if cause.frozen else [],
        "seed": seed,
        "recipe": cause.recipe or "hf",
    }
    if cause.exact is not None or not cause.recipe:
        given["learning_rate"] = rate * (RATES[model] * cause.rate if cause.exact is None else cause.exact)
    epochs = float(round((cause.epochs or 3.0) * longer))
    if cause.recipe and cause.epochs is not None:
        given["num_train_epochs"] = epochs
    if not cause.recipe:
        doubled = round(math.log2(_times(key, "batch", 0.5, 2.0))) if cause.batch == 16 else 0
        batch = round(cause.batch * 2.0**doubled)
        given |= {"num_train_epochs": epochs, "per_device_train_batch_size": batch}
        if cause.right == ("healthy",):  # a run without a fault has enough steps
            given["num_train_epochs"] = float(min(10, max(epochs, -(-FEWEST_STEPS * batch // rows))))
    return given | ({"load_best_model_at_end": False} if not cause.recipe else {})
