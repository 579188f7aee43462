"""Train runs that fail on purpose, split by task, and diagnose them: confusion matrix, false alarms.

    python bench/diagnose_runs.py --output FOLDER --make --seconds 300 --processes 14 --follow 0.5   # a GPU, no network
    python bench/diagnose_runs.py --output FOLDER --table [--list]                      # any machine, a minute
    python bench/diagnose_runs.py --output FOLDER --features docs/research/measurements/diagnose_signs.json.gz

Training and diagnosis are separate: --table runs the current diagnosis on the stored event logs. Runs in --output are not trained
again. Rules are chosen on the tasks of one group and reported on the two others. See docs/research/diagnosis.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from diagnose_tasks import GROUPS, SHARED, TASKS, Rows, Splits, label_map, read_task  # noqa: E402
from tunesmith.config.load import load_config  # noqa: E402
from tunesmith.config.options import RunConfig, to_dict  # noqa: E402
from tunesmith.diagnosis.verdict import advised_options  # noqa: E402
from tunesmith.events import (  # noqa: E402
    Evaluated,
    Event,
    Finding,
    Improved,
    NonFinite,
    RowsEvaluated,
    RunEnded,
    RunStarted,
    to_json,
)
from tunesmith.labels import LabelMap, Task  # noqa: E402
from tunesmith.metrics.evidence import BestConstant, describe_constant, encode_rows, keep_rows  # noqa: E402
from tunesmith.metrics.table import Suite, make_suite  # noqa: E402
from tunesmith.pipeline.recipe import NAMES  # noqa: E402

MODELS = {
    "L3": "paraphrase-MiniLM-L3-v2",
    "G": "granite-embedding-30m-english",
    "G3": "granite-3-layers",
    "L6": "all-MiniLM-L6-v2",
}
"""The third is the second without its upper three layers; make it yourself and add its path to BANK_MODELS."""
MADE_WITH = tuple(os.environ.get("BANK_MODELS", "L3,G").split(","))
"""The models; the first two are for causes whose harm is measured against the usual run."""
RATES = {"L3": 1e-4, "G": 6e-5, "G3": 1e-4, "L6": 6e-5}
"""Encoders with 3 and 6 layers need a higher learning rate than the 5e-5 of base-size ones."""
Key = tuple[str, str, str, int]
"""Model, task, cause, seed."""
LATE = ("stopped_too_early", "underfitting")
Spoil = Callable[[Splits, str, random.Random, float], None]
"""Changes the labels; the number multiplies the cause's share."""


@dataclass(frozen=True)
class Cause:
    """A way to fail. `right`: correct first verdicts. `rate`: factor for the learning rate, or with `exact` its value."""

    right: tuple[str, ...]
    rate: float = 1.0
    exact: float | None = None
    epochs: float | None = None
    """None: three, or the recipe's decision."""
    rows: int | None = None
    held_out: int | None = None
    """Maximum number of validation rows."""
    many: bool = False
    """More rows than usual for the task, if available."""
    recipe: str = ""
    """"auto" or "hf" uses the options of `tunesmith train --recipe`; empty uses this script's options."""
    evaluations: int = 1
    """Evaluations per epoch."""
    batch: int = 16
    frozen: bool = False
    spoil: Spoil | None = None
    only: Callable[[str], bool] = lambda task: True


def _other(label: Any, task: str, pick: random.Random) -> Any:
    """Return a random different label."""
    if TASKS[task].kind is Task.REGRESSION:
        return pick.choice(read_task(task)["train"])[1]
    names = label_map(task).names
    if TASKS[task].kind is Task.MULTILABEL:
        return tuple(sorted(pick.sample(names, len(label))))
    return pick.choice([name for name in names if name != label])


def _noise(share: float, parts: tuple[str, ...] = ("train", "validation")) -> Spoil:
    """Return a function that replaces this share of training and validation labels with wrong ones."""

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
    """Return a function that changes the label ids of this share of the validation rows."""

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
    """Remove all except every 40th training row of one class (neither the largest nor the smallest)."""
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
    """Return the name of a run."""
    return "-".join(map(str, key))


COMPARED = (
    *("healthy", "batch_256", "batch_1", "rate_2e-3", "frozen", "half_learnt", "without_class", "auto_short"),
    *("auto_rate_2e-3", "hf_frozen", "auto_without_class"),
)
"""Causes that are harmless on some tasks; decided by comparison with the usual run of the same model and task."""


def fits(cause: str, task: str) -> bool:
    """Return whether a cause can be applied to a task."""
    given, small = CAUSES[cause], TASKS[task].rows <= 200
    return given.only(task) and not (small and (given.rows is not None or cause.startswith("noise")))


FEWEST_STEPS = 120
SEEDS = 3
FIRST_DRAWN = 10
"""With this seed or a higher one, strengths of causes vary, so that no single number identifies a cause."""
HELD_OUT = (120, 250, 400, 500)
WELL = "auto:9 auto_300:6 auto_small:4 auto_10:3 healthy:2 healthy_3:4 healthy_10:4 hf:4"
FAULTY = """
    rate_1e-2:2 auto_rate_1e-2:2 rate_2e-3:2 auto_rate_2e-3:1 rate_1e-6:2 auto_rate_1e-6:1
    short:3 shorter:1 auto_short:3 half_learnt:2 frozen:2 hf_frozen:1 batch_1:2 batch_256:2
    few_rows:3 fewer_rows:1 auto_few_rows:3 shuffled:3 shuffled_long:1 auto_shuffled:3
    noise_40:4 noise_40_long:1 auto_noise_40:4 noise_20:1 noise_40_train:3
    swapped:2 swapped_60:3 auto_swapped:3 without_class:2 auto_without_class:2
"""
"""Number of runs per cause in a hundred runs."""
TIMES = {name: int(count) for name, count in (part.split(":") for part in f"{WELL} {FAULTY}".split())}


def list_runs(groups: Collection[str], *, drawn: bool, most: int = 2000) -> list[Key]:
    """Return the usual run of every task, then causes and tasks in alternating, reshuffled order, so that a part is balanced."""
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
    """Return a seeded factor between both limits, or 1 for seeds that use the table's strengths."""
    share = random.Random(f"{name_run(key)} {what}").random()
    return math.exp(math.log(low) + share * math.log(high / low)) if key[3] >= FIRST_DRAWN else 1.0


def make_rows(key: Key) -> Splits:
    """Return training, validation and test rows; test rows are never changed."""
    _, task, name, seed = key
    cause, splits = CAUSES[name], dict(read_task(task))
    pick = random.Random(seed)
    train = list(splits["train"])
    pick.shuffle(train)
    usual = TASKS[task].rows
    wanted = (cause.rows or usual) if cause.many else min(cause.rows or usual, usual)
    if cause.rows is not None:
        wanted = round(wanted * _times(key, "rows", 0.7, 1.4))
    elif name not in COMPARED:  # compared runs use the same rows
        wanted = round(wanted * _times(key, "rows", 0.5, 1.0))
    splits["train"] = train[:wanted]
    if TASKS[task].kind is not Task.REGRESSION:  # every class needs a row, so that none is unknown
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
    """Return the options that the command line would set for this many rows; the recipe decides the rest."""
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


TRAIN_SAMPLE = 192


@cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(SHARED / "models" / model), local_files_only=True)


def _labels(rows: Rows, labels: LabelMap) -> Any:
    if labels.task is Task.REGRESSION:
        return np.array([value for _, value in rows], dtype=np.float32)
    if labels.task is Task.MULTILABEL:
        return np.array([[float(n in value) for n in labels.names] for _, value in rows], dtype=np.float32)
    ids = labels.label2id
    return np.array([ids[value] for _, value in rows], dtype=np.int64)


def _tokens(rows: Rows, labels: LabelMap, model: str, length: int) -> Any:
    from tunesmith.data.batches import TokenRows

    tokenizer = _tokenizer(model)
    texts = [[t[k] for t, _ in rows] for k in range(len(rows[0][0]))]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    return TokenRows.from_lists({**encoded, "labels": _labels(rows, labels)})


@dataclass
class Material:
    """Inputs of a run: rows, tokens, the model on its device, and the options with the recipe's decisions."""

    config: RunConfig
    labels: LabelMap
    rows: Splits
    tokens: dict[str, Any]
    padding: Any
    runtime: Any
    model: Any
    suite: Suite
    baselines: dict[str, Any]
    probe_rows: str | None = None


def _prepare(key: Key, options: Mapping[str, Any] | None) -> Material:
    """Prepare a run with the cause's options, or with `options` (those of an earlier run with changes)."""
    from tunesmith.data.batches import Padding
    from tunesmith.models.load import load_model
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.optimizer import freeze
    from tunesmith.training.state import seed_everything

    rows, labels = make_rows(key), label_map(key[1])
    given = make_options(key, len(rows["train"])) if options is None else options
    config = load_config(None, given, need_data=False)
    name = str(config.model_name_or_path)
    tokens = {s: _tokens(r, labels, name, config.max_seq_length or 64) for s, r in rows.items()}
    seed_everything(config.seed)
    runtime = make_runtime(precision="no")  # the steps are small: casts would cost more launches than they save
    loaded = load_model(SHARED / "models" / name, labels, new_head=True)
    suite, padding = make_suite(labels.task), Padding(int(_tokenizer(name).pad_token_id))
    made = Material(config, labels, rows, tokens, padding, runtime, loaded.model.to(runtime.device), suite, {})
    _settle(made, loaded)
    freeze(made.model, made.config.freeze)
    made.model.to(runtime.device)
    return made


def _settle(made: Material, loaded: Any) -> None:
    """Decide what `tunesmith train` decides before the first step: linear probe, recipe, pooling and first head.

    The pair start is not included.
    """

    from tunesmith.models.families import set_pooling
    from tunesmith.pipeline.probe import LoadedRun, linear_probe, start_head
    from tunesmith.pipeline.recipe import _closed, decide, facts_of
    from tunesmith.pipeline.train import RunObserver

    class BenchRun(LoadedRun):
        def texts(self, split: str, rows: Any) -> list[str]:
            return [" ".join(made.rows[split][int(i)][0]) for i in rows]

    bundle: Any = made  # only the labels of a DataBundle are used
    config, probe = made.config, None
    parts = (made.padding, made.suite, made.runtime, RunObserver())
    if config.recipe == "auto" or config.head_start == "on":
        seen = {split: part for split, part in made.tokens.items() if split != "test"}
        probe = linear_probe(BenchRun(config, loaded, bundle, seen, *parts))
        made.baselines = probe.baselines if probe else {}
        made.probe_rows = probe.evidence(made.tokens["train"], made.labels) if probe else None
    run = BenchRun(config, loaded, bundle, made.tokens, *parts)
    if config.recipe == "auto":
        config = replace(config, **{d.name: d.value for d in decide(config, facts_of(run, probe))})
    made.config = config = _closed(config)
    set_pooling(made.model, config.decided.pooling)
    if config.head_start == "on":
        start_head(run, None, config.decided.pooling)


def make_run(key: Key, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train a run; return options, data summary and event log. The last evaluation of "test" uses the kept weights."""
    from tunesmith.data.batches import Batches
    from tunesmith.pipeline.prepare import make_plan
    from tunesmith.training.evaluation import TaskLoss, resolve_class_weights
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.state import TrainState

    began, made = time.time(), _prepare(key, options)
    config, decided, labels, train = made.config, made.config.decided, made.labels, made.tokens["train"]
    size, accumulation = decided.per_device_train_batch_size, config.gradient_accumulation_steps
    batches = Batches(train, made.padding, size, seed=config.seed, accumulation=accumulation)
    if options is None and (times := CAUSES[key[2]].evaluations) > 1:
        every = max(1, batches.steps_in_epoch(0) // times)
        config = replace(config, eval_strategy="steps", eval_steps=every)
    plan = make_plan(config, batches, made.suite, has_validation=True, on_gpu=made.runtime.device.type == "cuda")
    optimizer = make_optimizer(
        made.model,
        learning_rate=decided.learning_rate,
        weight_decay=config.weight_decay,
        layerwise_lr_decay=decided.layerwise_lr_decay,
        head_lr_scale=config.head_lr_scale,
    )
    weights = config.class_weights and resolve_class_weights(config.class_weights, train.labels, labels.names)
    objective = TaskLoss(labels.task, len(labels), weights or None, config.label_smoothing_factor)
    state = TrainState(made.model, optimizer, objective, made.runtime)
    judge = _Judge(
        made,
        state,
        BestConstant.of(labels.task, train.labels, len(labels)),
        CAUSES[key[2]].right in (RISEN, ("healthy",)),
    )
    rows, ends = len(train), plan.epoch_ends
    judge.events.append(
        RunStarted(name_run(key), 0, plan.num_steps, float(ends[0]), plan.fraction(plan.num_steps), rows, began)
    )
    ended = judge.train(train_events(state, batches, plan, evaluate=lambda _: judge.evaluate()), config)
    metrics, n = judge.score("test")
    judge.events.append(Evaluated(state.step, plan.fraction(state.step), "test", metrics, n))
    judge.events.append(RunEnded(state.step, ended, time.time()))
    summary = {
        "task": labels.task.value,
        "labels": list(labels.names),
        "label_counts": {"train": _count(train.labels, labels)},
        "best_constant": describe_constant(judge.constant, made.tokens["validation"].labels, made.suite),
        "baselines": made.baselines,
        "probe_rows": made.probe_rows,
    }
    journal = "".join(f"{json.dumps(to_json(e))}\n" for e in judge.events if type(e).__name__ != "SafePoint")
    kept = {name: value for name, value in to_dict(config).items() if value is not None}
    return {
        "key": key,
        "options": kept,
        "summary": summary,
        "journal": journal,
        "seconds": round(time.time() - began, 1),
    }


@dataclass
class _Judge:
    """Evaluates a run; keeps its events and the weights of its best evaluation."""

    made: Material
    state: Any
    constant: BestConstant
    with_test: bool
    """Whether to evaluate the test rows at the lowest validation loss, too, to find out if those weights were better."""
    lowest: float = math.inf

    def __post_init__(self) -> None:
        self.events: list[Event] = []
        tokens = self.made.tokens
        size = min(TRAIN_SAMPLE, len(tokens["train"]))
        sample = np.sort(np.random.default_rng(0).choice(len(tokens["train"]), size, False))
        self.tokens = {**tokens, "train_sample": tokens["train"].select(sample)}
        self.best: dict[str, Any] | None = None

    def score(self, split: str) -> tuple[dict[str, float | None], int]:
        from tunesmith.training.evaluation import predict_rows

        found = predict_rows(
            self.made.model, self.tokens[split], self.made.padding, self.made.runtime, objective=self.state.objective
        )
        kept = keep_rows(self.constant, found.logits, found.labels)
        if kept is not None:
            self.events.append(RowsEvaluated(self.state.step, split, encode_rows(kept)))
        return {"loss": found.loss, **self.made.suite.compute(found.logits, found.labels)}, len(self.tokens[split])

    def evaluate(self) -> dict[str, tuple[dict[str, float | None], int]]:
        found = {split: self.score(split) for split in ("validation", "train_sample")}
        loss = found["validation"][0]["loss"]
        if self.with_test and loss is not None and loss < self.lowest:
            self.lowest = loss
            self.events = [e for e in self.events if not (isinstance(e, RowsEvaluated) and e.split == "test")]
            self.score("test")
        return found

    def train(self, events: Any, config: RunConfig) -> str:
        """Train to the end and load the weights that the run would keep."""
        ended = "completed"
        for event in events:
            self.events.append(event)
            if isinstance(event, Improved) and config.load_best_model_at_end is not False:
                self.best = {name: value.clone() for name, value in self.made.model.state_dict().items()}
            if isinstance(event, NonFinite):
                ended = "NumericsError"
                break
        if self.best is not None:
            self.made.model.load_state_dict(self.best)
        return ended


def _count(values: Any, labels: LabelMap) -> dict[str, int]:
    if labels.task is Task.REGRESSION:
        return {}
    counts = values.sum(axis=0) if labels.task is Task.MULTILABEL else np.bincount(values, minlength=len(labels))
    return {name: int(c) for name, c in zip(labels.names, counts, strict=True)}


def advice_of(findings: list[Finding]) -> dict[str, str | None]:
    """Return the options that the printed command would change: those of the first advice that consists of options."""
    return next((found for advice in findings[0].advice if (found := advised_options(advice))), {})


def judge_run(run: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of the current diagnosis about a run."""
    from tunesmith.report.build import diagnose_with
    from tunesmith.runs.event_log import build_curves, columns_of, parse_events

    events = list(parse_events(run["journal"].encode(), name_run(tuple(run["key"]))))
    return diagnose_with(build_curves(columns_of(events), name=run["key"][1]), run["options"], run["summary"])


OTHER = {"recipe": "auto", **dict.fromkeys((*NAMES, "load_best_model_at_end", "freeze", "gradient_accumulation_steps"))}
"""More fixes to try: all options from the recipe."""
TRIED = {
    "overfitting": ({"load_best_model_at_end": "true"}, OTHER),
    "calibration_drift": ({"load_best_model_at_end": "true"}, OTHER),
    "class_ignored": (OTHER,),
    "erratic": (OTHER,),
    "underfitting": (OTHER,),
    "stopped_too_early": (OTHER,),
}
"""Changes that were tried to choose the advice."""


def list_changes(run: Mapping[str, Any], findings: list[Finding]) -> list[dict[str, str | None]]:
    """Return the first advice for an unhealthy run, and on development tasks also alternatives."""
    first = advised_options(findings[0].advice[0]) if findings[0].advice else {}
    if findings[0].code in ("healthy", "not_enough_evidence") or not first:
        return []
    if TASKS[run["key"][1]].group not in ("choose", "report", "last"):
        return [first]
    some = findings[0].code in ("overfitting", "calibration_drift", "class_ignored", "erratic")
    rest = [advised_options(advice) for advice in findings[0].advice[1:3] if some]
    return [first, *(found for found in (*rest, *TRIED.get(findings[0].code, ())) if found not in ({}, first))]


def follow_run(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Train again on the same rows with the advised options; return nothing for a good run, or for advice without options."""
    findings = judge_run(run)
    for place, changes in enumerate(list_changes(run, findings)):
        options = {name: value for name, value in run["options"].items() if changes.get(name, "") is not None}
        options |= {name: value for name, value in changes.items() if value is not None}
        made = make_run(tuple(run["key"]), options)
        test = [line for line in made["journal"].splitlines() if '"RowsEvaluated"' in line and '"test"' in line][-1]
        what = {"verdict": findings[0].code, "changes": changes, "place": place, "test": test}
        yield {"key": run["key"], **what, "seconds": made["seconds"]}


def _work(number: int, todo: list[Key], following: Any, until: float, output: Path, follow: float) -> None:
    """Train runs in one process until none are left or the time is up."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    file = output / f"bank-{number}.jsonl.gz"
    with gzip.open(file, "at", compresslevel=6) as out:
        while time.time() < until:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(todo):
                return
            try:
                run = make_run(todo[at])
                out.write(json.dumps(run) + "\n")
                chosen = zlib.crc32(name_run(todo[at]).encode()) % 100 < 100 * follow
                for followed in follow_run(run) if chosen and time.time() < until else ():
                    out.write(json.dumps(followed) + "\n")
                out.flush()
            except Exception:  # a failed run is skipped
                print(name_run(todo[at]), traceback.format_exc()[-1500:], flush=True)


def make_bank(output: Path, keys: list[Key], *, seconds: float, processes: int, follow: float = 0.0) -> None:
    """Train the runs that are not in `output` until the time is up; each process writes one file.

    `follow`: the share of runs that are trained again with the first advice.
    """
    output.mkdir(parents=True, exist_ok=True)
    done = {tuple(run["key"]) for run in read_bank(output)}
    wanted = [key for key in keys if key not in done]
    context = multiprocessing.get_context("spawn")
    following, until, first = context.Value("i", 0), time.time() + seconds, len(list(output.glob("bank-*.gz")))
    rest = (wanted, following, until, output, follow)
    if processes == 1:
        return _work(first, *rest)
    workers = [context.Process(target=_work, args=(first + k, *rest)) for k in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    made = list(read_bank(output))
    runs = sum("journal" in run for run in made) - len(done)
    print(f"{runs} of {len(wanted)} runs trained in {seconds + time.time() - until:.0f} s", end=", ", flush=True)
    print(f"{sum('changes' in run for run in made)} runs in total were trained again with the advice", flush=True)
    return None


def merge_bank(output: Path, files: int) -> None:
    """Concatenate the gzip files of all processes into at most this many files."""
    found = sorted(output.glob("bank-*.gz"))
    for number in range(min(files, len(found))):
        data = b"".join(path.read_bytes() for path in found[number::files])
        (output / f"merged-{number}.jsonl.gz").write_bytes(data)
    for path in found:
        path.unlink()
    for path in sorted(output.glob("merged-*.gz")):
        path.rename(path.with_name(path.name.replace("merged", "bank")))


def read_bank(output: Path) -> Any:
    """Return all runs in these files, without a truncated last line."""
    for path in sorted(output.glob("bank-*.gz")):
        try:
            with gzip.open(path, "rt") as file:
                for line in file:
                    if line.endswith("\n"):
                        yield json.loads(line)
        except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
            continue


def main() -> None:
    """Train missing runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs (bank-*.jsonl.gz)")
    parser.add_argument("--make", action="store_true", help="train missing runs")
    parser.add_argument("--seconds", type=float, default=600, help="start no run after this time")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--follow", type=float, default=0.0, help="share of runs to train again with the first advice")
    parser.add_argument("--drawn", action="store_true", help="vary the strengths of causes, for runs to fit a model to")
    parser.add_argument(
        "--most", type=int, default=2000, help="maximum number of runs in addition to the usual one of every task"
    )
    parser.add_argument("--merge", type=int, help="maximum number of files")
    parser.add_argument("--table", action="store_true", help="print the tables")
    parser.add_argument("--list", action="store_true", help="print one line per run")
    parser.add_argument(
        "--group", type=_groups, default=GROUPS[:-1], help="only runs of tasks of these groups: GROUP,..."
    )
    parser.add_argument("--features", type=Path, help="write the features for bench/diagnose_fit.py")
    args = parser.parse_args()
    if args.make:
        wanted = list_runs(args.group, drawn=args.drawn, most=args.most)
        make_bank(args.output, wanted, seconds=args.seconds, processes=args.processes, follow=args.follow)
    if args.merge:
        merge_bank(args.output, args.merge)
    if not (args.table or args.list or args.features):
        return
    from diagnose_table import load_runs, print_followed, print_runs, print_table, write_features

    runs, followed = load_runs(args.output, groups=args.group)
    if args.features:
        write_features(runs, args.features)
    if args.list:
        print_runs(runs)
    if args.table:
        for group in args.group:
            print_table(group, [run for run in runs if run.group == group])
            print_followed(group, [later for later in followed if later.run.group == group])


def _groups(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := set(found) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the groups are {', '.join(GROUPS)}")
    return found


if __name__ == "__main__":
    main()
