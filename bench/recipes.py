"""Is `--recipe auto` better than transformers' recipe? Test scores by task, number of rows and recipe, seeds paired.

    .venv/bin/python bench/recipes.py --tasks cr sick sts r8 news6 --sizes 200 500 2000 --seeds 5 --recipes hf_equal auto
    .venv/bin/python bench/recipes.py --tasks mrpc trec subj --recipes hf_equal auto ablations    # each choice taken out
    .venv/bin/python bench/recipes.py --table FILE.json                                          # the table again

Every run has its own subset of rows, order and head, by its seed; the recipes of one seed share them. It takes the way of
`tunesmith train` (the probe, the decisions, the engine), without a validation set and without files: the weights after the
last step are scored on the test split. `hf` is `--recipe hf`, `hf_equal` the same with the epochs of `auto`: equal rows
through the model. One process trains many runs; `--jobs` of them share the device. Stops after `--seconds`; the JSON is
written after each run. Data and models are those of ../shared (--data, --model for others).
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SHARED = Path(__file__).resolve().parents[2] / "shared"
TASKS: dict[str, dict[str, Any]] = {
    "mrpc": {"metric": "accuracy"},
    "trec": {"metric": "accuracy"},
    "subj": {"metric": "accuracy"},
    "cr": {"metric": "accuracy"},
    "r8": {"metric": "accuracy"},
    "news6": {"metric": "accuracy"},
    "sick": {"metric": "accuracy", "file": "_entailment"},
    "sts": {"metric": "spearmanr", "file": "_relatedness", "folder": "sick", "options": {"do_regression": True}},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "pooling first": {"pooling": "first"},
    "pooling pooler": {"pooling": "pooler"},
    "head_start on": {"head_start": "on"},
    "learning_rate 5e-5": {"learning_rate": 5e-5},
    "learning_rate 2e-4": {"learning_rate": 2e-4},
    "layerwise_lr_decay 1": {"layerwise_lr_decay": 1.0},
    "warmup_steps 0": {"warmup_steps": 0},
    "head_lr_scale 5": {"head_lr_scale": 5.0},
    "weight_decay 0.01": {"weight_decay": 0.01},
    "num_train_epochs 3": {"num_train_epochs": 3.0, "head_start": "off"},
    "num_train_epochs 3, head_start on": {"num_train_epochs": 3.0, "head_start": "on"},
    "per_device_train_batch_size 16": {"per_device_train_batch_size": 16},
}
"""`auto` with one choice changed."""
Spec = dict[str, Any]


def read_rows(data: Path, task: str, split: str) -> list[dict[str, str]]:
    """The rows of a split as dicts."""
    about = TASKS[task]
    file = data / about.get("folder", task) / f"{split}{about.get('file', '')}.tsv"
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{k: v for k, v in row.items() if k not in ("idx", "id")} for row in found]


def equal_epochs(rows: int) -> float:
    """The passes that `auto` makes over so many rows."""
    from tunesmith.labels import Task
    from tunesmith.recipes.deciding import RunFacts, epochs_for

    return epochs_for(RunFacts("bert", 384, 6, rows, 2, Task.BINARY), 8, 1)[0]


def options_of(spec: Spec, rows: int) -> dict[str, Any]:
    """The options that a recipe of this table gives."""
    name = spec["recipe"]
    if name == "hf":
        return {"recipe": "hf"}
    if name == "hf_equal":
        return {"recipe": "hf", "num_train_epochs": equal_epochs(rows)}
    return {"recipe": "auto", **(ABLATIONS[name] if name != "auto" else {})}


def train_once(spec: Spec, data: Path, runtime: Any, cache: str) -> dict[str, Any]:
    """One run; its score on the test split and what it took."""
    from tunesmith.config.load import load_config
    from tunesmith.engine.loop import train_events
    from tunesmith.session.finish import predict_splits, score_splits
    from tunesmith.session.inputs import read_run_data
    from tunesmith.session.planning import make_plan
    from tunesmith.session.prepare import prepare
    from tunesmith.session.watch import Watch

    about = TASKS[spec["task"]]
    train, test = (read_rows(data, spec["task"], split) for split in ("train", "test"))
    order = np.random.default_rng(spec["seed"]).permutation(len(train))
    chosen = [train[i] for i in (order[: spec["size"]] if spec["size"] else order)]
    on_gpu = runtime.device.type == "cuda"
    given = {
        "model_name_or_path": spec["model"],
        "seed": spec["seed"],
        "validation_split_fraction": 0.0,
        "allow_empty_text": True,
        "metric_name": about["metric"],
        "cache_dir": cache,
        "output_dir": str(Path(cache) / "none"),
        "use_cpu": not on_gpu,
        **about.get("options", {}),
        **options_of(spec, len(chosen)),
    }
    config = load_config(None, {k: v for k, v in given.items() if v is not None}, need_data=False)
    said: list[str] = []
    found = read_run_data(config, {"train": chosen, "validation": None, "test": test}, lambda *_: None)
    prepared = prepare(config, runtime, lambda: found, Watch(say=said.append))
    plan = make_plan(prepared.config, prepared.batches, prepared.suite, has_validation=False, on_gpu=on_gpu)
    began = time.perf_counter()
    for _ in train_events(prepared.state, prepared.batches, plan):
        pass
    seconds = time.perf_counter() - began
    scores = score_splits(prepared, predict_splits(prepared, None, lambda *_: None))["test"]
    probe = prepared.settled.probe
    return {
        **spec,
        "score": scores[about["metric"]].value,
        "n": scores[about["metric"]].n,
        "steps": plan.num_steps,
        "epochs": prepared.config.decided.num_train_epochs,
        "pooling": prepared.config.decided.pooling,
        "seconds": round(seconds, 3),
        "probe_seconds": None if probe is None else round(probe.seconds, 3),
        "floors": {k: next(iter(v.values()))["value"] for k, v in prepared.settled.floors.get("test", {}).items()},
        "notes": [line for line in said if " is off: " in line],
    }


def work(todo: Any, done: Any, data: str, cpu: bool) -> None:
    """A worker process: runs until nothing is left to do."""
    import logging

    import torch

    from tunesmith.ranks.runtime import has_bf16, make_runtime

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    runtime = make_runtime(precision="bf16" if has_bf16(use_cpu=cpu) else "no", use_cpu=cpu)
    with tempfile.TemporaryDirectory() as cache:
        while True:
            try:
                spec = todo.get(timeout=1)
            except queue.Empty:
                break
            try:
                done.put(train_once(spec, Path(data), runtime, cache))
            except Exception as error:  # one run that fails is a line of the table, not the end of it
                import traceback

                done.put({**spec, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]})


def run_all(specs: list[Spec], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, by several processes, until they are done or the time is over."""
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for spec in specs:
        todo.put(spec)
    workers = [
        context.Process(target=work, args=(todo, done, str(args.data), args.cpu), daemon=True) for _ in range(args.jobs)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < len(specs) and time.perf_counter() - began < args.seconds:
        try:
            found.append(done.get(timeout=2))
        except queue.Empty:
            if not any(w.is_alive() for w in workers):
                break
            continue
        last = found[-1]
        if "error" in last:
            print(f"{last['task']} {last['size']} {last['recipe']}: {last['error']}\n{last['trace']}", flush=True)
        if args.output:
            args.output.write_text(json.dumps(found, indent=0), encoding="utf-8")
    for worker in workers:
        worker.terminate()
    print(f"{len(found)} of {len(specs)} runs in {time.perf_counter() - began:.0f} s", flush=True)
    return found


Cell = tuple[str, str, int]


def paired_gains(runs: list[dict[str, Any]], name: str, against: str) -> dict[Cell, list[float]]:
    """By model, task and size: score with `name` minus score with `against`, in points, of seeds that have both."""
    table: dict[Any, dict[str, float]] = {}
    for run in runs:
        if run.get("score") is not None:
            table.setdefault((run["model"], run["task"], run["size"], run["seed"]), {})[run["recipe"]] = run["score"]
    gains: dict[Cell, list[float]] = {}
    for (model, task, size, _), scores in sorted(table.items()):
        if name in scores and against in scores:
            gains.setdefault((model, task, size), []).append(100 * (scores[name] - scores[against]))
    return gains


def mean_with_interval(gains: dict[Cell, list[float]]) -> tuple[float, float, float]:
    """The mean over cells, and its 95% interval by a bootstrap over tasks."""
    by_task: dict[str, list[float]] = {}
    for (_, task, _), values in gains.items():
        by_task.setdefault(task, []).append(statistics.fmean(values))
    means = np.array([statistics.fmean(values) for values in by_task.values()])
    rng = np.random.default_rng(0)
    drawn = means[rng.integers(len(means), size=(10_000, len(means)))].mean(axis=1)
    return float(means.mean()), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def print_table(runs: list[dict[str, Any]]) -> None:
    """Scores by cell, then what each recipe gains."""
    if any(run["recipe"] == "hf" for run in runs):
        runs = runs + [
            {**run, "recipe": "hf"} for run in runs if run["recipe"] == "hf_equal" and run.get("epochs") == 3.0
        ]
    names = [n for n in ("hf", "hf_equal", "auto", *ABLATIONS) if any(r["recipe"] == n for r in runs)]
    shown = [n for n in names if n not in ABLATIONS]
    floors = ("frozen features + linear head", "TF-IDF + linear model")
    print(f"| model | task | rows | seeds | {' | '.join((*shown, *floors))} | auto - hf_equal |")
    print("|---" * (5 + len(shown) + len(floors)) + "|")
    equal = paired_gains(runs, "auto", "hf_equal")
    for model, task, size in sorted({(r["model"], r["task"], r["size"]) for r in runs}):
        here = [
            r for r in runs if (r["model"], r["task"], r["size"]) == (model, task, size) and r.get("score") is not None
        ]
        by_recipe = [{r["seed"] for r in here if r["recipe"] == n} for n in shown]
        shared = set.intersection(*by_recipe)  # the same seeds in every column
        here = [r for r in here if r["seed"] in shared]
        cells = [_mean([r["score"] for r in here if r["recipe"] == n]) for n in shown]
        cells += [_mean([r["floors"][f] for r in here if r["recipe"] == "auto" and f in r["floors"]]) for f in floors]
        gain = equal.get((model, task, size))
        print(
            f"| {Path(model or 'MiniLM-L6').name} | {task} | {size or 'all'} | {len(shared)} | {' | '.join(cells)} | "
            f"{f'{statistics.fmean(gain):+.1f}' if gain else ''} |"
        )
    print("\n| recipe | beside | mean gain, points | 95% interval over tasks | worst task x size | not below 0 |")
    print("|---|---|---|---|---|---|")
    pairs = [("auto", n) for n in shown if n != "auto"] + [(n, "auto") for n in names if n in ABLATIONS]
    for name, against in pairs:
        gains = paired_gains(runs, name, against)
        if gains:
            mean, low, high = mean_with_interval(gains)
            by_cell = {cell: statistics.fmean(values) for cell, values in gains.items()}
            worst = min(by_cell, key=lambda cell: by_cell[cell])
            share = statistics.fmean(value >= 0 for value in by_cell.values())
            print(
                f"| {name} | {against} | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {worst[1]} {worst[2] or 'all'} "
                f"{by_cell[worst]:+.1f} | {share:.0%} of {len(by_cell)} |"
            )


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else ""


def main() -> None:
    """Runs what was asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["cr", "sick", "sts", "r8", "news6"], choices=tuple(TASKS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 500, 2000], help="training rows; 0: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", default=["hf", "hf_equal", "auto"])
    parser.add_argument("--ablation_seeds", type=int, default=3, help="of the ablations and of runs on all rows")
    parser.add_argument("--ablation_tasks", nargs="*", default=["mrpc", "trec", "subj"], choices=tuple(TASKS))
    parser.add_argument("--model", nargs="+", default=[None], help="folder of the base model [the embedded MiniLM-L6]")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cpu", action="store_true", help="although a GPU is there")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results, train nothing")
    args = parser.parse_args()
    if args.table:
        print_table([run for file in args.table for run in json.loads(file.read_text(encoding="utf-8"))])
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    recipes = [n for name in args.recipes for n in (ABLATIONS if name == "ablations" else [name])]
    specs = make_specs(args, [n for n in recipes if n not in ABLATIONS], args.tasks)
    changed = [n for n in recipes if n in ABLATIONS]
    if changed:
        limited = argparse.Namespace(
            **{**vars(args), "seeds": args.ablation_seeds, "sizes": [s for s in args.sizes if s]}
        )
        specs += make_specs(limited, ["auto", *changed], args.ablation_tasks)
    print_table(run_all(list({json.dumps(spec): spec for spec in specs}.values()), args))


def make_specs(args: argparse.Namespace, recipes: list[str], tasks: list[str]) -> list[Spec]:
    """The runs, seed by seed; `hf` is left out where it is `hf_equal`, sizes that the data does not have too."""
    specs = []
    rows = {task: len(read_rows(args.data, task, "train")) for task in tasks}
    for seed in range(1, args.seeds + 1):
        for size in args.sizes:
            for task in tasks:
                many = size or rows[task]
                if many > rows[task] or (not size and seed > args.ablation_seeds):
                    continue
                same = equal_epochs(many) == 3.0
                for recipe in recipes:
                    if not (same and (recipe == "hf" or recipe == "num_train_epochs 3")):
                        specs += [
                            {"model": m, "task": task, "size": size, "seed": seed, "recipe": recipe} for m in args.model
                        ]
    return specs


if __name__ == "__main__":
    main()
