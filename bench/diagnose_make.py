"""Trains the runs of bench/diagnose_runs.py with the engine alone (no `datasets`) and keeps what a verdict needs of each."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from diagnose_causes import CAUSES, Key, list_runs, make_options, make_rows, name_run
from diagnose_tasks import SHARED, Rows, label_map
from tunesmith.events import Evaluated, Event, NonFinite, RowsEvaluated, RunEnded, RunStarted
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.constant import BestConstant, describe_constant
from tunesmith.metrics.row_evidence import encode_rows, keep_rows
from tunesmith.metrics.suite import make_suite
from tunesmith.run.journal import encode_event

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
    from tunesmith.tokens.token_rows import TokenRows

    tokenizer = _tokenizer(model)
    texts = [[t[k] for t, _ in rows] for k in range(len(rows[0][0]))]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    return TokenRows.from_lists({**encoded, "labels": _labels(rows, labels)})


def make_run(key: Key) -> dict[str, Any]:
    """One run: its options, its data summary and its journal."""
    from tunesmith.encoder.load import load_model
    from tunesmith.encoder.params import freeze
    from tunesmith.engine.loop import train_events
    from tunesmith.engine.losses import TaskLoss
    from tunesmith.engine.optim import make_optimizer
    from tunesmith.engine.plan import Calendar, Plan, epoch_ends_for
    from tunesmith.engine.schedule import Schedule
    from tunesmith.engine.seed import seed_everything
    from tunesmith.engine.state import TrainState
    from tunesmith.predict.torch_network import padding_of
    from tunesmith.ranks.runtime import has_bf16, make_runtime
    from tunesmith.tokens.batches import Batches

    options, rows, labels = make_options(key), make_rows(key), label_map(key[1])
    model_name, began = options["model_name_or_path"], time.time()
    parts = {s: _tokens(r, labels, model_name, options["max_seq_length"]) for s, r in rows.items()}
    seed_everything(options["seed"])
    runtime = make_runtime(precision="bf16" if has_bf16(use_cpu=False) else "no")
    model = load_model(SHARED / "models" / model_name, labels, new_head=True).model
    freeze(model, tuple(options["freeze"]))
    model.to(runtime.device)
    padding = padding_of(_tokenizer(model_name))
    batches = Batches(parts["train"], padding, options["per_device_train_batch_size"], seed=options["seed"])
    steps, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=-1, num_epochs=options["num_train_epochs"])
    every = max(1, ends[0] // CAUSES[key[2]].evaluations)
    options |= {"eval_strategy": "steps", "eval_steps": every}
    plan = Plan(
        steps,
        ends,
        Schedule("linear", options["learning_rate"], 0, steps),
        seed=options["seed"],
        evaluate=Calendar("steps", every, frozenset(ends), steps),
        read_back_every=16,
        metric="loss",
        greater_is_better=False,
    )
    optimizer = make_optimizer(model, learning_rate=options["learning_rate"])
    state = TrainState(model, optimizer, TaskLoss(labels.task, len(labels)), runtime)
    constant = BestConstant.of(labels.task, parts["train"].labels, len(labels))
    sample = np.sort(np.random.default_rng(0).choice(len(rows["train"]), min(TRAIN_SAMPLE, len(rows["train"])), False))
    seen = {"validation": parts["validation"], "train_sample": parts["train"].select(sample)}
    suite, events = make_suite(labels.task), list[Event]()
    events.append(RunStarted(name_run(key), 0, steps, float(ends[0]), plan.fraction(steps), len(rows["train"]), began))

    def score(split: str, tokens: Any) -> tuple[dict[str, float | None], int]:
        from tunesmith.engine.evaluate import predict_rows

        found = predict_rows(model, tokens, padding, runtime, objective=state.objective)
        kept = keep_rows(constant, found.logits, found.labels)
        if kept is not None:
            events.append(RowsEvaluated(state.step, split, encode_rows(kept)))
        return {"loss": found.loss, **suite.compute(found.logits, found.labels)}, len(tokens)

    ended = "completed"
    for event in train_events(
        state, batches, plan, evaluate=lambda _: {split: score(split, tokens) for split, tokens in seen.items()}
    ):
        events.append(event)
        if isinstance(event, NonFinite):
            ended = "NumericsError"
            break
    metrics, n = score("test", parts["test"])
    events += [Evaluated(state.step, plan.fraction(state.step), "test", metrics, n)]
    events.append(RunEnded(state.step, ended, time.time()))
    summary = {
        "task": labels.task.value,
        "labels": list(labels.names),
        "label_counts": {"train": _count(parts["train"].labels, labels)},
        "best_constant": describe_constant(constant, parts["validation"].labels, suite),
    }
    journal = b"".join(encode_event(event) for event in events if type(event).__name__ != "SafePoint").decode()
    seconds = round(time.time() - began, 1)
    return {"key": key, "options": options, "summary": summary, "journal": journal, "seconds": seconds}


def _count(values: Any, labels: LabelMap) -> dict[str, int]:
    if labels.task is Task.REGRESSION:
        return {}
    counts = values.sum(axis=0) if labels.task is Task.MULTILABEL else np.bincount(values, minlength=len(labels))
    return {name: int(c) for name, c in zip(labels.names, counts, strict=True)}


def _work(number: int, todo: list[Key], following: Any, until: float, output: Path) -> None:
    """One process: takes the next run until there is none or the time is up."""
    import torch

    torch.set_num_threads(1)
    file = output / f"bank-{number}.jsonl.gz"
    with gzip.open(file, "at", compresslevel=6) as out:
        while time.time() < until:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(todo):
                return
            try:
                out.write(json.dumps(make_run(todo[at])) + "\n")
                out.flush()
            except Exception:  # one run less; the others are made
                print(name_run(todo[at]), traceback.format_exc()[-1500:], flush=True)


def make_bank(output: Path, *, seconds: float, processes: int, seeds: int, only: list[str] | None = None) -> None:
    """Makes runs that are not in `output` until the time is up; each process writes one file there."""
    output.mkdir(parents=True, exist_ok=True)
    done = {tuple(run["key"]) for run in read_bank(output)}
    wanted = [key for key in list_runs(seeds) if key not in done and (only is None or key[1] in only or key[2] in only)]
    context = multiprocessing.get_context("spawn")
    following, until, first = context.Value("i", 0), time.time() + seconds, len(list(output.glob("bank-*.gz")))
    if processes == 1:
        return _work(first, wanted, following, until, output)
    workers = [
        context.Process(target=_work, args=(first + k, wanted, following, until, output)) for k in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    made = sum(1 for _ in read_bank(output)) - len(done)
    print(f"{made} of {len(wanted)} runs made in {seconds + time.time() - until:.0f} s", flush=True)
    return None


def merge_bank(output: Path, files: int) -> None:
    """The files of all processes as at most so many: gzip members stand one behind the other."""
    found = sorted(output.glob("bank-*.gz"))
    for number in range(min(files, len(found))):
        data = b"".join(path.read_bytes() for path in found[number::files])
        (output / f"merged-{number}.jsonl.gz").write_bytes(data)
    for path in found:
        path.unlink()
    for path in sorted(output.glob("merged-*.gz")):
        path.rename(path.with_name(path.name.replace("merged", "bank")))


def read_bank(output: Path) -> Any:
    """Every run in these files; a last line that was cut is left out."""
    for path in sorted(output.glob("bank-*.gz")):
        try:
            with gzip.open(path, "rt") as file:
                for line in file:
                    if line.endswith("\n"):
                        yield json.loads(line)
        except (EOFError, gzip.BadGzipFile, json.JSONDecodeError):
            continue
