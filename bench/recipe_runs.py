"""The runs of bench/recipes.py: recipe, engine and speedups of `tunesmith train`, from token ids, without files.

A unit is one model, task, number of examples and seed. Its recipes share examples, order and head, and run one after the other in
one process, so that times are comparable. A process ends after a device error; a different one continues with the rest.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import queue
import time
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from few_labels import pick_rows, train_library, train_setfit
from recipe_tasks import REGRESSION, unpack_model

ABLATIONS: dict[str, dict[str, Any]] = {
    "pooling first": {"pooling": "first"},
    "pooling pooler": {"pooling": "pooler"},
    "pooling mean": {"pooling": "mean"},
    "pooling first, dense trained": {"pooling": "first", "dense": "trained"},
    "pooling mean, dense trained": {"pooling": "mean", "dense": "trained"},
    "pair_start off": {"pair_start": 0},
    "pair_start 600": {"pair_start": 600},
    "head_start on": {"head_start": "on"},
    "learning_rate 5e-5": {"learning_rate": 5e-5},
    "learning_rate 1e-4": {"learning_rate": 1e-4},
    "learning_rate 2e-4": {"learning_rate": 2e-4},
    "layerwise_lr_decay 1": {"layerwise_lr_decay": 1.0},
    "learning_rate 5e-5, layerwise_lr_decay 1": {"learning_rate": 5e-5, "layerwise_lr_decay": 1.0},
    "warmup_steps 0": {"warmup_steps": 0},
    "head_lr_scale 5": {"head_lr_scale": 5.0},
    "head_lr_scale 10": {"head_lr_scale": 10.0},
    "learning_rate 5e-5, head_lr_scale 10": {"learning_rate": 5e-5, "head_lr_scale": 10.0},
    "weight_decay 0.01": {"weight_decay": 0.01},
    "num_train_epochs 3": {"num_train_epochs": 3.0, "head_start": "off"},
    "num_train_epochs 3, head_start on": {"num_train_epochs": 3.0, "head_start": "on"},
    "per_device_train_batch_size 16": {"per_device_train_batch_size": 16},
    "class_weights balanced": {"class_weights": "balanced"},
    "adversarial 0.02": {"adversarial": 0.02},
}
"""`auto` with one choice changed. `dense` is not an option of tunesmith: the dense layer before the last one starts as the
identity, as `pooling` sets it, and is trained."""
LONG = {f"{kind} {length}": (kind, length) for length in (128, 256, 512) for kind in ("head", "head_tail")}
"""`auto` with `--max_seq_length` and `--long_texts`, for tasks packed with longer texts."""
RARE = ("r8", "r8head", "sickneg", "rare5", "rare_games")
"""Tasks with a rare class."""
MOST_SECONDS = 4.0
"""`hf_seconds` trains at most this many times as many steps as `auto`."""
Unit = dict[str, Any]
Found = dict[str, Any]


@cache
def _task(pack: Path, model: str, task: str) -> Any:
    """Return both splits as TokenRows, the label map, and the model's padding."""
    from tunesmith.data.batches import Padding, TokenRows
    from tunesmith.labels import LabelMap, Task

    special = json.loads((pack / model / "special.json").read_text(encoding="utf-8"))
    stored = np.load(pack / model / f"{task}.npz")
    about = json.loads(stored["about"].tobytes())
    splits = {}
    for split in ("train", "test"):
        rows = np.split(stored[f"{split}_ids"].astype(np.int64), np.cumsum(stored[f"{split}_lengths"].astype(int))[:-1])
        columns: dict[str, Any] = {"input_ids": rows, "labels": stored[f"{split}_labels"]}
        if special["types"]:  # the second text begins after the first separator
            columns["token_type_ids"] = [np.cumsum(r == special["sep"]) - (r == special["sep"]) > 0 for r in rows]
        splits[split] = TokenRows.from_lists(columns)
    labels = LabelMap(("score",), Task.REGRESSION) if task in REGRESSION else LabelMap.for_classes(about["names"])
    return splits, labels, Padding(pad_token_id=special["pad"])


@cache
def _model(pack: Path, model: str, place: Path) -> Path:
    return unpack_model(pack / model, place / model)


def rows_of(unit: Unit, rows: Any) -> Any:
    """Return the training examples of a unit, sampled with its seed: `size` in total or per class."""
    if unit.get("per_class"):
        return rows.select(pick_rows(rows.labels, unit["size"], unit["seed"]))
    order = np.random.default_rng(unit["seed"]).permutation(len(rows))
    return rows.select(order[: unit["size"]] if unit["size"] else order)


def shown(rows: Any, recipe: str) -> Any:
    """Return the examples truncated as `--long_texts` does."""
    from tunesmith.data.batches import TokenRows

    if recipe not in LONG:
        return rows
    kind, length = LONG[recipe]
    front = length // 2 if kind == "head_tail" else length - 1
    columns: dict[str, Any] = {"labels": rows.labels}
    for name, column in rows.columns.items():
        whole = [np.asarray(values) for values in column.take(np.arange(len(rows)))]
        columns[name] = [v if len(v) <= length else np.concatenate([v[:front], v[front - length :]]) for v in whole]
    return TokenRows.from_lists(columns)


def options_of(recipe: str, before: dict[str, Found]) -> dict[str, Any]:
    """Return the options of a recipe; `before` contains the unit's earlier runs."""
    if recipe == "hf":
        return {"recipe": "hf"}
    if recipe == "hf_equal":
        return {"recipe": "hf", "num_train_epochs": before["auto"]["epochs"]}
    if recipe == "hf_seconds":
        auto, equal = before["auto"], before["hf_equal"]
        ratio = (auto["seconds"] + (auto["probe_seconds"] or 0.0)) / equal["seconds"]
        return {"recipe": "hf", "max_steps": round(auto["steps"] * min(max(ratio, 1.0), MOST_SECONDS))}
    return {"recipe": "auto", **ABLATIONS.get(recipe, {})}


def train_once(unit: Unit, recipe: str, before: dict[str, Found], pack: Path, place: Path, runtime: Any) -> Found:
    """Train one recipe and return its test score and cost."""
    import torch

    from tunesmith.config.load import load_config
    from tunesmith.data.batches import Batches
    from tunesmith.inference.tables import probabilities_of
    from tunesmith.metrics.calibration import expected_calibration_error
    from tunesmith.metrics.table import make_suite
    from tunesmith.models.families import dense_of
    from tunesmith.models.load import load_model
    from tunesmith.pipeline.prepare import make_plan
    from tunesmith.pipeline.probe import LoadedRun
    from tunesmith.pipeline.recipe import choose_recipe
    from tunesmith.pipeline.train import RunObserver
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.evaluation import TaskLoss, predict_rows, resolve_class_weights
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.state import TrainState, seed_everything

    began_all = time.perf_counter()
    splits, labels, padding = _task(pack, unit["model"], unit["task"])
    folder = _model(pack, unit["model"], place)
    train, test = rows_of(unit, splits["train"]), shown(splits["test"], recipe)
    train = shown(train, recipe)
    on_gpu = runtime.device.type == "cuda"
    given = {"model_name_or_path": str(folder), "seed": unit["seed"], "cache_dir": str(place)}
    options = options_of(recipe, before)
    trained = options.pop("dense", None) is not None
    given |= {"output_dir": str(place / "none"), "use_cpu": not on_gpu, **options}
    config = load_config(None, given, need_data=False)
    suite = make_suite(labels.task)
    seed_everything(config.seed)
    loaded = load_model(folder, labels)
    bundle: Any = SimpleNamespace(labels=labels, splits={})
    began = time.perf_counter()
    settled = choose_recipe(LoadedRun(config, loaded, bundle, {"train": train}, padding, suite, runtime, RunObserver()))
    settling = time.perf_counter() - began  # the linear probe, the pair start, the first head
    config, model = settled.config, loaded.model.to(runtime.device)
    if trained:
        dense_of(model).requires_grad_(True)
    began = time.perf_counter()
    speedups = apply_speedups(model, train, padding, device=runtime.device, precision=runtime.precision)
    chosen = config.decided
    optimizer = make_optimizer(
        model,
        learning_rate=chosen.learning_rate,
        weight_decay=config.weight_decay,
        layerwise_lr_decay=chosen.layerwise_lr_decay,
        head_lr_scale=config.head_lr_scale,
    )
    weights = None
    if config.class_weights is not None:
        weights = resolve_class_weights(config.class_weights, train.labels, labels.names)
    objective = TaskLoss(labels.task, len(labels), weights)
    state = TrainState(
        model, optimizer, objective, runtime, push=config.adversarial, speedups=speedups, only_writer=True
    )
    sampling, ahead = speedups.best_order(runtime.device), 2 if on_gpu else 0
    size, seed = chosen.per_device_train_batch_size, config.seed
    batches = Batches(train, speedups.train_collate, size, seed=seed, sampling=sampling, ahead=ahead, pinned=on_gpu)
    plan = make_plan(config, batches, suite, has_validation=False, on_gpu=on_gpu)
    for _ in train_events(state, batches, plan):
        pass
    if on_gpu:
        torch.cuda.synchronize(runtime.device)
    seconds = time.perf_counter() - began
    speedups.close()
    found = predict_rows(model, test, padding, runtime, max_rows=None if on_gpu else 64)
    metric = "spearmanr" if unit["task"] in REGRESSION else "accuracy"
    classes = unit["task"] not in REGRESSION
    error = expected_calibration_error(probabilities_of(found.logits, labels.task), found.labels) if classes else None
    return {
        "recipe": recipe,
        "score": suite.compute(found.logits, found.labels)[metric],
        "n": len(splits["test"]),
        "ece": error,
        "ece_chance": chance_error(found.logits, labels.task) if classes else None,
        "steps": plan.num_steps,
        "epochs": chosen.num_train_epochs,
        "pooling": chosen.pooling,
        "seconds": round(seconds, 3),
        "head_start": config.head_start,
        "pair_start": config.pair_start,
        "probe_seconds": None if config.recipe == "hf" else round(settling, 3),
        "all_seconds": round(time.perf_counter() - began_all, 3),
        "on": list(speedups.on),
        "rare": measure_rare(found.logits, found.labels, labels) if unit["task"] in RARE else None,
    }


def chance_error(logits: Any, task: Any) -> float:
    """Return the calibration error of a perfect model on this many examples: labels are drawn from its probabilities."""
    from tunesmith.inference.tables import probabilities_of
    from tunesmith.metrics.calibration import expected_calibration_error

    table, rng = probabilities_of(logits, task), np.random.default_rng(0)
    sums = table.cumsum(1) / table.sum(1, keepdims=True)
    drawn = [(rng.random((len(sums), 1)) > sums).sum(1).clip(0, sums.shape[1] - 1) for _ in range(20)]
    return float(np.mean([expected_calibration_error(table, labels) for labels in drawn]))


def measure_rare(logits: Any, gold: Any, labels: Any) -> Found | None:
    """Return F1 on one half of the test set, with the largest probability and with thresholds fitted to the other half.

    F1 is that of the rarer of two classes, otherwise macro F1; `moved` follows the rule of `--move_thresholds`.
    """
    from tunesmith.labels import Task
    from tunesmith.metrics.calibration import fit_thresholds
    from tunesmith.metrics.table import make_suite, softmax

    half = np.random.default_rng(0).permutation(len(gold)) < len(gold) // 2
    table = softmax(logits.astype(np.float64))
    moved = fit_thresholds(table[half], gold[half], labels.task)
    name = "f1" if labels.task is Task.BINARY else "f1_macro"

    def f1(thresholds: Any) -> float | None:
        suite = make_suite(labels.task, names=(name,), scores="probabilities", thresholds=thresholds)
        return suite.compute(table[~half], gold[~half])[name]

    thresholds = None if moved is None else moved.thresholds
    return {"metric": name, "plain": f1(None), "moved": f1(thresholds), "kept": thresholds is not None}


def _run_unit(unit: Unit, put: Any, pack: Path, place: Path, runtime: Any) -> bool:
    """Train and report each recipe; return False after a device error, because the process may be in an invalid state."""
    known = {key: unit[key] for key in ("model", "task", "size", "seed", "tries")}
    before: dict[str, Found] = {run["recipe"]: run for run in unit.get("before", ())}
    for recipe in unit["recipes"]:
        if recipe in before:
            continue
        auto = before.get("auto", {})
        if ABLATIONS.get(recipe) == {"pooling": auto.get("pooling")}:  # the same as `auto`
            put({**known, **auto, "recipe": recipe})
            continue
        try:
            task = _task(pack, unit["model"], unit["task"])
            if recipe in ("setfit", "setfit_library"):
                folder = _model(pack, unit["model"], place)
                auto = before["auto"]
                taken = auto["seconds"] + (auto["probe_seconds"] or 0.0)
                train = train_setfit if recipe == "setfit" else train_library
                before[recipe] = train(unit, rows_of(unit, task[0]["train"]), task, folder, runtime, taken)
            else:
                before[recipe] = train_once(unit, recipe, before, pack, place, runtime)
            put({**known, **before[recipe]})
        except Exception as error:  # a failed run is a line of the table; the others continue
            text = f"{type(error).__name__}: {error}"
            put({**known, "recipe": recipe, "error": text, "trace": traceback.format_exc()[-2500:]})
            if "CUDA" in text or "Triton" in text:
                put({"again": {**unit, "tries": unit["tries"] + 1, "before": list(before.values())}})
                return False
            if recipe in ("auto", "hf_equal"):
                return True  # later runs are compared with it
        gc.collect()
    if unit.get("later"):
        put({"later": {**unit, "recipes": unit["later"], "later": [], "before": list(before.values())}})
    return True


def work(todo: Any, done: Any, pack: str, place: str, cpu: bool, warm: Unit | None) -> None:
    """Process units until none are left."""
    import logging

    import torch

    from tunesmith.training.distributed import has_bf16, make_runtime

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    runtime = make_runtime(precision="bf16" if has_bf16(use_cpu=cpu) else "no", use_cpu=cpu)
    folder = Path(place) / multiprocessing.current_process().name
    if warm is not None:  # compile kernels and load libraries before anything is timed
        _run_unit(
            warm,
            lambda found: done.put({**found, "warm": True}) if "error" in found else None,
            Path(pack),
            folder,
            runtime,
        )
    while True:
        try:
            unit = todo.get(timeout=1)
        except queue.Empty:
            break
        fine = _run_unit(unit, done.put, Path(pack), folder, runtime)
        done.put({"ended": True})
        if not fine:
            break
    done.close()
    done.join_thread()
