"""Compare `--recipe auto` with transformers' defaults: test scores by model, task, number of examples and recipe, paired by seed.

    .venv/bin/python bench/recipe_tasks.py --model ../shared/models/paraphrase-MiniLM-L3-v2       # writes scratch/recipes_data
    .venv/bin/python bench/recipes.py --sizes 200 500 2000 0 --seeds 5 --jobs 14 --seconds 330 --output report.json
    .venv/bin/python bench/recipes.py --tasks mrpc trec subj --recipes auto ablations             # change one choice at a time
    .venv/bin/python bench/recipes.py --table FILE.json                                           # print the table again

The seed determines the subset of examples, their order and the head; all recipes of a seed share them. Linear probe, decisions,
engine and speedups are those of `tunesmith train`. There is no validation set: the weights after the last step are scored on the
test split. `hf` is `--recipe hf`; `hf_equal` is `hf` with the epochs of `auto`; `hf_seconds` is `hf` with more steps, so that it
takes as long as `auto` with its probe in the same process. A process trains many runs; `--jobs` processes share the device. Runs
are ordered by seed, so that results are balanced if `--seconds` end early. The JSON is written after each run. Needs neither
`datasets` nor a network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from recipe_runs import ABLATIONS, LONG, Unit, work
from recipe_tasks import LOOKED_AT, NEW, PACK, TASKS

MOST_TRIES = 2


def run_all(units: list[Unit], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all runs in several processes until they are done or the time is over; replace processes that end."""
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for unit in units:
        todo.put(unit)
    left, found, lost = len(units), list[dict[str, Any]](), 0
    small = {"size": 8 if args.per_class else 64, "task": args.tasks[0], "recipes": ["auto", "hf_equal"]}
    warm = {**units[0], **small} if args.warm else None
    with tempfile.TemporaryDirectory() as place:
        arguments = (todo, done, str(args.data), place, args.cpu, warm)
        workers: list[Any] = []
        while left and time.perf_counter() - began < args.seconds:
            workers = [w for w in workers if w.is_alive()]
            if not todo.empty():
                workers += [_start(context, arguments) for _ in range(args.jobs - len(workers))]
            try:
                last = done.get(timeout=2)
            except queue.Empty:
                if not workers and todo.empty():
                    break
                continue
            if "ended" in last:
                left -= 1
            elif "later" in last:
                todo.put(last["later"])
                left += 1
            elif "again" in last:
                lost += 1
                if last["again"]["tries"] < MOST_TRIES:
                    todo.put(last["again"])
                    left += 1
            else:
                found.append(last)
                if "error" in last:
                    print(
                        f"{last['task']} {last['size']} {last['recipe']}: {last['error']}\n{last['trace']}", flush=True
                    )
                if args.output:
                    args.output.write_text(json.dumps(found, indent=0), encoding="utf-8")
        for worker in workers:
            worker.terminate()
            worker.join()
    print(
        f"{len(found)} runs, {left} of {len(units)} units left, {lost} processes ended by a device error, "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return found


def _start(context: Any, arguments: tuple[Any, ...]) -> Any:
    worker = context.Process(target=work, args=arguments, daemon=True)
    worker.start()
    return worker


Cell = tuple[str, str, int]


def paired_gains(runs: list[dict[str, Any]], name: str, against: str) -> dict[Cell, list[float]]:
    """Return score differences of `name` and `against` in points, by model, task and size, for seeds with both."""
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
    """Return the mean over cells and its 95% interval (bootstrap over tasks)."""
    by_task: dict[str, list[float]] = {}
    for (_, task, _), values in gains.items():
        by_task.setdefault(task, []).append(statistics.fmean(values))
    means = np.array([statistics.fmean(values) for values in by_task.values()])
    rng = np.random.default_rng(0)
    drawn = means[rng.integers(len(means), size=(10_000, len(means)))].mean(axis=1)
    return float(means.mean()), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def growth(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the mean score of `auto` in points by number of examples (all: infinity), by model and task.

    An earlier rule trained some text pairs without a pair warm-up; these runs are excluded.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    runs = [run for run in runs if run["recipe"] == "auto" and run.get("score") is not None]
    pairs = {run["task"] for run in runs if run.get("pair_start")}
    for run in sorted(runs, key=lambda run: (run["model"], run["task"], run["size"] or float("inf"))):
        if run.get("pair_start") or run["task"] not in pairs:
            sizes = found.setdefault((run["model"], run["task"]), {})
            sizes.setdefault(run["size"] or float("inf"), []).append(100 * run["score"])
    return {
        cell: {size: statistics.fmean(points) for size, points in sizes.items()}
        for cell, sizes in found.items()
        if len(sizes) > 1
    }


def print_table(runs: list[dict[str, Any]]) -> None:
    """Print scores by cell, then the gain of each recipe, by model and overall."""
    if any(run["recipe"] == "hf" for run in runs):
        runs = runs + [
            {**run, "recipe": "hf"} for run in runs if run["recipe"] == "hf_equal" and run.get("epochs") == 3.0
        ]
    known = ("hf", "hf_equal", "hf_seconds", "setfit", "setfit_library", "auto", *LONG, *ABLATIONS)
    others = sorted({str(r["recipe"]) for r in runs} - {*known})
    names = [n for n in (*known, *others) if any(r["recipe"] == n for r in runs)]
    shown = [n for n in names if n not in (*ABLATIONS, *others)]
    compared = [n for n in shown if n not in ("auto", *LONG)]
    print(f"| model | task | rows | seeds | {' | '.join(shown)} | {' | '.join(f'auto - {n}' for n in compared)} |")
    print("|---" * (4 + len(shown) + len(compared)) + "|")
    scored = [run for run in runs if run.get("score") is not None]
    gains = {n: paired_gains(runs, "auto", n) for n in compared}
    for cell in sorted({(r["model"], r["task"], r["size"]) for r in scored}):
        here = [r for r in scored if (r["model"], r["task"], r["size"]) == cell]
        every = [{r["seed"] for r in here if r["recipe"] == n} for n in shown if any(r["recipe"] == n for r in here)]
        shared = set.intersection(*every) if every else {r["seed"] for r in here}
        cells = [_mean([r["score"] for r in here if r["recipe"] == n and r["seed"] in shared]) for n in shown]
        cells += [f"{statistics.fmean(gains[n][cell]):+.1f}" if cell in gains[n] else "" for n in compared]
        print(f"| {cell[0]} | {cell[1]} | {cell[2] or 'all'} | {len(shared)} | {' | '.join(cells)} |")
    print(
        "\n| model | recipe | vs. | mean gain | 95% interval over tasks | worst task | worst task x size | not below |"
    )
    print("|---|---|---|---|---|---|---|---|")
    pairs = [("auto", n) for n in compared] + [(n, "auto") for n in names if n in (*ABLATIONS, *others)]
    pairs += [(n, f"head {n.split()[-1]}") for n in names if n in LONG and not n.startswith("head ")]
    models = sorted({str(run["model"]) for run in scored})
    for model in [*models, "all"] if len(models) > 1 else models:
        for name, against in pairs:
            _print_gain(model, name, against, [r for r in scored if model in ("all", r["model"])])
    _print_growth(scored)
    _print_rare(scored)
    _print_seconds(scored)
    failed = [run for run in runs if "error" in run]
    print(
        f"\n{len(scored)} runs, {len(failed)} ended with an error, {sum('CUDA' in r['error'] for r in failed)} of the device"
    )


def _print_gain(model: str, name: str, against: str, runs: list[dict[str, Any]]) -> None:
    gains = paired_gains(runs, name, against)
    if not gains:
        return
    mean, low, high = mean_with_interval(gains)
    by_cell = {cell: statistics.fmean(values) for cell, values in gains.items()}
    tasks = {task: statistics.fmean(v for c, v in by_cell.items() if c[1] == task) for _, task, _ in by_cell}
    cell, task = min(by_cell, key=lambda c: by_cell[c]), min(tasks, key=lambda t: tasks[t])
    share = statistics.fmean(value >= 0 for value in by_cell.values())
    print(
        f"| {model} | {name} | {against} | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {task} {tasks[task]:+.2f} | "
        f"{cell[1]} {cell[2] or 'all'} {by_cell[cell]:+.1f} | {share:.0%} of {len(by_cell)} |"
    )


def _print_growth(runs: list[dict[str, Any]]) -> None:
    """Print the scores of `auto` by number of examples, and their smallest gain from one size to the next."""
    print("\n| model | task | points of auto by rows | smallest gain |\n|---|---|---|---|")
    for (model, task), points in growth(runs).items():
        shown = ", ".join(f"{size:g}: {point:.1f}".replace("inf", "all") for size, point in points.items())
        print(f"| {model} | {task} | {shown} | {min(b - a for a, b in pairwise(points.values())):+.1f} |")


def _print_rare(runs: list[dict[str, Any]]) -> None:
    """Print F1 with and without moved thresholds, with and without class weights: means over seeds."""
    runs = [run for run in runs if run.get("rare") and run["recipe"] in ("auto", "class_weights balanced")]
    if not any(run["recipe"] != "auto" for run in runs):
        return
    print("\n| model | task | rows | seeds | metric | recipe | largest probability | moved thresholds | moved in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for cell in sorted({(r["model"], r["task"], r["size"], r["recipe"]) for r in runs}, key=str):
        here = [r["rare"] for r in runs if (r["model"], r["task"], r["size"], r["recipe"]) == cell]
        means = [_mean([r[kind] for r in here]) for kind in ("plain", "moved")]
        moved = f"{sum(r['kept'] for r in here)} of {len(here)}"
        size = cell[2] or "all"
        print(
            f"| {cell[0]} | {cell[1]} | {size} | {len(here)} | {here[0]['metric']} | {cell[3]} | {' | '.join(means)} | {moved} |"
        )


def _print_seconds(runs: list[dict[str, Any]]) -> None:
    """Print the time of each recipe relative to `auto` with its probe: medians over pairs."""
    table: dict[Any, dict[str, float]] = {}
    for run in runs:
        key = (run["model"], run["task"], run["size"], run["seed"])
        table.setdefault(key, {})[run["recipe"]] = run["seconds"] + (run.get("probe_seconds") or 0.0)
    for name in ("hf_equal", "hf_seconds", "setfit", "setfit_library"):
        ratios = [found[name] / found["auto"] for found in table.values() if name in found and "auto" in found]
        if ratios:
            print(f"\n{name}: {statistics.median(ratios):.2f} times the seconds of auto (median of {len(ratios)})")


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else ""


def main() -> None:
    """Train the requested runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*LOOKED_AT, *NEW], choices=tuple(TASKS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 500, 2000], help="training rows; 0: all")
    parser.add_argument("--per_class", action="store_true", help="--sizes are examples per class")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--recipes", nargs="+", default=["auto", "hf_equal", "hf_seconds"])
    parser.add_argument("--later", nargs="+", default=[], help="recipes to run after all others")
    parser.add_argument("--models", nargs="+", help="folders of --data [all]")
    parser.add_argument("--data", type=Path, default=PACK, help="output of bench/recipe_tasks.py")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    parser.add_argument("--warm", action="store_true", help="train a small model in each process before timing starts")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results without training")
    args = parser.parse_args()
    if args.table:
        print_table([run for file in args.table for run in json.loads(file.read_text(encoding="utf-8"))])
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.models = args.models or sorted(p.name for p in args.data.iterdir() if p.is_dir())
    print_table(run_all(make_units(args), args))


def make_units(args: argparse.Namespace) -> list[Unit]:
    """Return units by seed, the longest first, without sizes that exceed the data."""
    recipes = [n for name in args.recipes for n in (ABLATIONS if name == "ablations" else [name])]
    rows = {task: len(np.load(args.data / args.models[0] / f"{task}.npz")["train_lengths"]) for task in args.tasks}
    kind = {"per_class": True} if args.per_class else {}
    sizes = args.sizes if args.per_class else sorted(args.sizes, key=lambda size: -size if size else -(10**9))
    return [
        {
            "model": model,
            "task": task,
            "size": size,
            "seed": seed,
            "recipes": recipes,
            "later": args.later,
            "tries": 0,
            **kind,
        }
        for seed in args.seeds
        for size in sizes
        for task in args.tasks
        for model in args.models
        if size < rows[task]
    ]


if __name__ == "__main__":
    main()
