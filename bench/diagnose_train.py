"""Trains one run of bench/diagnose_runs.py with the engine alone (no `datasets`) and gives what a verdict needs of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from diagnose_causes import CAUSES, RISEN, Key, name_run
from diagnose_drawn import make_options, make_rows
from diagnose_sources import SHARED, Rows, Splits
from diagnose_tasks import label_map
from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, to_dict
from tunesmith.events import Evaluated, Event, Improved, NonFinite, RowsEvaluated, RunEnded, RunStarted
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.evidence import BestConstant, describe_constant, encode_rows, keep_rows
from tunesmith.metrics.table import Suite, make_suite
from tunesmith.runs.event_log import encode_event

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
    from tunesmith.data.tokens import TokenRows

    tokenizer = _tokenizer(model)
    texts = [[t[k] for t, _ in rows] for k in range(len(rows[0][0]))]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    return TokenRows.from_lists({**encoded, "labels": _labels(rows, labels)})


@dataclass
class Material:
    """What a run is trained from: rows, tokens, the model on its device, and the options with the recipe's decisions."""

    config: RunConfig
    labels: LabelMap
    rows: Splits
    tokens: dict[str, Any]
    padding: Any
    runtime: Any
    model: Any
    suite: Suite
    floors: dict[str, Any]
    probe_rows: str | None = None


def _prepare(key: Key, options: Mapping[str, Any] | None) -> Material:
    """`options`: of an earlier run with changes to them; else what the cause asks for."""
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
    """What `tunesmith train` decides before the first step: the probe, the recipe, the pooling and the first head.

    Not the pair start, which came later.
    """

    from tunesmith.models.pooling import set_pooling
    from tunesmith.pipeline.probe import LoadedRun, linear_probe, start_head
    from tunesmith.pipeline.recipe import _closed, decide, facts_of
    from tunesmith.pipeline.watch import Watch

    class BenchRun(LoadedRun):
        def texts(self, split: str, rows: Any) -> list[str]:
            return [" ".join(made.rows[split][int(i)][0]) for i in rows]

    bundle: Any = made  # of a DataBundle only the labels are used
    config, probe = made.config, None
    parts = (made.padding, made.suite, made.runtime, Watch())
    if config.recipe == "auto" or config.head_start == "on":
        seen = {split: part for split, part in made.tokens.items() if split != "test"}
        probe = linear_probe(BenchRun(config, loaded, bundle, seen, *parts))
        made.floors = probe.baselines if probe else {}
        made.probe_rows = probe.evidence(made.tokens["train"], made.labels) if probe else None
    run = BenchRun(config, loaded, bundle, made.tokens, *parts)
    if config.recipe == "auto":
        config = replace(config, **{d.name: d.value for d in decide(config, facts_of(run, probe))})
    made.config = config = _closed(config)
    set_pooling(made.model, config.decided.pooling)
    if config.head_start == "on":
        start_head(run, None, config.decided.pooling)


def make_run(key: Key, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One run: its options, its data summary and its journal; the last evaluation of "test" is of the weights it would keep."""
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
        weight_decay=decided.weight_decay,
        layerwise_lr_decay=decided.layerwise_lr_decay,
        head_lr_scale=decided.head_lr_scale,
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
        "floors": made.floors,
        "probe_rows": made.probe_rows,
    }
    journal = b"".join(encode_event(event) for event in judge.events if type(event).__name__ != "SafePoint").decode()
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
    """Evaluates the rows of a run, keeps its events and the weights of its best evaluation."""

    made: Material
    state: Any
    constant: BestConstant
    with_test: bool
    """Whether the test rows are evaluated at the lowest validation loss too, to know whether those weights were better."""
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
        """Runs to the end; leaves the model with the weights that the run would keep."""
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
