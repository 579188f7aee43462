"""`--recipe best` for bench/recipes.py: its own stages and choices, with runs by the engine alone, from token ids, without files.

`tunesmith.tuning` decides what is tried, compared, averaged and deployed; only the training of one run and the reading of its
held-out rows are replaced here. The budget is BEST_TIMES the seconds of `auto` in the same process, all of it counted.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BEST_TIMES = 5


def train_best(unit: dict[str, Any], auto: dict[str, Any], task: Any, folder: Path, place: Path, runtime: Any) -> Any:
    """One run of `best`; its score on the test split, calibration error, what was deployed, what it took."""
    from recipe_runs import chance_error
    from tunesmith.config.load import load_config
    from tunesmith.inference.tables import probabilities_of
    from tunesmith.metrics.calibration import expected_calibration_error
    from tunesmith.metrics.table import make_suite
    from tunesmith.pipeline.watch import Watch
    from tunesmith.tuning.best_model import Stages
    from tunesmith.tuning.chosen import choose_model, scale_head
    from tunesmith.tuning.clock import Clock, TimeUp

    began = time.perf_counter()
    splits, labels, _ = task
    budget = BEST_TIMES * auto["all_seconds"]
    given = {"model_name_or_path": str(folder), "seed": unit["seed"], "recipe": "best", "time_budget": f"{budget:.2f}s"}
    given |= {"cache_dir": str(place), "output_dir": str(place / "none"), "use_cpu": runtime.device.type == "cpu"}
    config = load_config(None, given, need_data=False)
    order = np.random.default_rng(unit["seed"]).permutation(len(splits["train"]))
    rows = splits["train"].select(order[: unit["size"]] if unit["size"] else order)
    with tempfile.TemporaryDirectory() as home:
        clock = Clock(Path(home) / "clock", budget)
        work = make_tries(config, task, rows, folder, Path(home), clock, runtime)
        stages = Stages(work, config, [str(folder)], Watch(pages=False), len(splits["test"]))
        with suppress(TimeUp):
            stages.explore()
        chosen = None
        if stages.members:
            clock.reserve = stages.last_seconds(stages.members[0])
            chosen = choose_model(work, stages.members, stages.seconds)
            clock.reserve = stages.finish_seconds(chosen.single)
        work.note("deploying", True)
        last = chosen.single if chosen else stages.auto
        model, steps = work.run_engine(last, None, all_rows=True)
        if chosen is not None and chosen.soup:
            _average(model, work.states, last.name, chosen.soup)
        if chosen is not None and chosen.temperature is not None:
            scale_head(model, chosen.temperature.value)
        found = work.predict(model, splits["test"])
    suite = make_suite(labels.task)
    metric = "accuracy" if "accuracy" in suite.names else "spearmanr"
    several = labels.task.value in ("binary", "multiclass")
    return {
        "recipe": "best",
        "score": suite.compute(found.logits, found.labels)[metric],
        "ece": expected_calibration_error(probabilities_of(found.logits, labels.task), found.labels)
        if several
        else None,
        "ece_chance": chance_error(found.logits, labels.task) if several else None,
        "n": len(splits["test"]),
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 3),
        "budget": round(budget, 3),
        "tried": {name: [run["state"], run["score"]] for name, run in work.record["runs"].items()},
        "deployed": "auto alone" if chosen is None else chosen.deployed,
        "lines": [] if chosen is None else list(chosen.lines()),
    }


def _average(model: Any, states: dict[str, Any], own: str, weights: dict[str, float]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.mul_(weights[own])
                for other, weight in weights.items():
                    if other != own:
                        tensor.add_(states[f"{other}-all"][name].to(tensor), alpha=weight)


def make_tries(config: Any, task: Any, rows: Any, folder: Path, home: Path, clock: Any, runtime: Any) -> Any:
    """The tries of `tunesmith.tuning`, with runs by the engine."""
    import torch

    from tunesmith.config.options import dump_config
    from tunesmith.data.batches import Batches
    from tunesmith.events import SafePoint, StepDone
    from tunesmith.metrics.table import make_suite
    from tunesmith.models.load import load_model
    from tunesmith.pipeline.prepare import make_plan
    from tunesmith.pipeline.probe import LoadedRun
    from tunesmith.pipeline.recipe import NAMES, choose_recipe
    from tunesmith.pipeline.watch import Watch
    from tunesmith.runs.folder import RunDir
    from tunesmith.runs.writing import make_folder, write_file
    from tunesmith.speedups.strategies import choose_strategies
    from tunesmith.training.evaluation import TaskLoss, predict_rows
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.state import TrainState, seed_everything
    from tunesmith.tuning.blending import HeldOut, join_folds
    from tunesmith.tuning.outcomes import Outcome
    from tunesmith.tuning.search import TrialPruned
    from tunesmith.tuning.tries import FOLDS, Tries

    _, labels, padding = task
    suite = make_suite(labels.task)
    metric = suite.metric_for_best_model
    home_of = _folds(rows, labels, FOLDS)
    on_gpu = runtime.device.type == "cuda"

    class EngineTries(Tries):
        def __init__(self) -> None:
            super().__init__(config, {}, home, clock, Watch(pages=False), len(rows), True)
            self.states: dict[str, Any] = {}
            self.models: dict[str, Any] = {}
            self.taken: list[StepDone] = []
            self.settled: dict[str, Any] = {}
            self.answers: dict[str, HeldOut] = {}

        def note(self, key: str, value: Any) -> Any:
            self.record[key] = value
            return value

        def _clear(self, run: Any, found: Any) -> None:
            pass

        def decided(self, variant: Any) -> dict[str, Any]:
            chosen = self.settled[self.path(variant, 1).name]
            return {name: getattr(chosen, name) for name in NAMES if name != "num_train_epochs"}

        def held_out(self, variant: Any, folds: Any) -> HeldOut:
            return join_folds([self.answers[self.path(variant, fold).name] for fold in folds])

        def cook(self, members: Any, weights: Any, folds: Any) -> HeldOut | None:
            parts = []
            for fold in folds:
                names = [self.path(one, fold).name for one in members]
                mean = {k: v.clone() for k, v in self.states[names[0]].items()}
                if any(
                    {k: v.shape for k, v in self.states[n].items()} != {k: v.shape for k, v in mean.items()}
                    for n in names
                ):
                    return None
                for key, tensor in mean.items():
                    if tensor.is_floating_point():
                        tensor.copy_(sum(w * self.states[n][key] for n, w in zip(names, weights, strict=True)))
                model = self.models[names[0]]
                model.load_state_dict(mean)
                parts.append(self.answer(model, fold))
            return join_folds(parts)

        def answer(self, model: Any, fold: int) -> HeldOut:
            found = self.predict(model, rows.select(np.flatnonzero(home_of == fold - 1)))
            logits = found.logits.astype(np.float64)
            logits = logits[:, 0] if labels.task.value == "regression" and logits.ndim == 2 else logits
            return HeldOut(labels.task, logits, found.labels, labels.names)

        def predict(self, model: Any, some: Any) -> Any:
            return predict_rows(model, some, padding, runtime, max_rows=None if on_gpu else 64)

        def _finetune(self, variant: Any, run: Any, fold: Any, halve: bool, all_rows: bool) -> Outcome:
            try:
                model, steps = self.run_engine(variant, fold, halve=halve, all_rows=all_rows)
            except TrialPruned as error:
                return Outcome("stopped", why=error.problem)
            name = run.path.name
            self.states[name] = {k: v.detach().clone() for k, v in model.state_dict().items()}
            self.models[name] = model
            self.answers |= {} if all_rows else {name: self.answer(model, fold)}
            score = None if all_rows else self.answers[name].score(metric)
            taken = self.taken
            epochs = taken[-1].epoch
            many = round(sum(step.examples for step in taken) / epochs)
            return Outcome("done", metric, score, None, 0.0, sum(s.seconds for s in taken), steps, many, epochs)

        def run_engine(self, variant: Any, fold: Any, *, halve: bool = False, all_rows: bool = False) -> Any:
            path = self.path(variant, fold, all_rows=all_rows)
            given = self.config_for(variant, path, fold, halve=halve, all_rows=all_rows)
            train = rows if all_rows else rows.select(np.flatnonzero(home_of != fold - 1))
            seed_everything(given.seed)
            loaded = load_model(folder, labels)
            bundle: Any = SimpleNamespace(labels=labels, splits={})
            last = all_rows and self.record.get("deploying")
            watch = self._make_watch(variant, RunDir(path), halve)
            shown = Watch() if last else watch
            loaded_run = LoadedRun(given, loaded, bundle, {"train": train}, padding, suite, runtime, shown)
            settled = choose_recipe(loaded_run).config
            self.settled[path.name] = settled
            make_folder(path)
            write_file(RunDir(path).config_file, dump_config(settled).encode())
            model, chosen = loaded.model.to(runtime.device), settled.decided
            strategies = choose_strategies(model, train, padding, device=runtime.device, precision=runtime.precision)
            rates = {
                n: getattr(chosen, n) for n in ("learning_rate", "weight_decay", "layerwise_lr_decay", "head_lr_scale")
            }
            optimizer = make_optimizer(model, **rates, layers=strategies.fused, only_writer=True)
            objective = TaskLoss(labels.task, len(labels))
            graphs, push = strategies.graphs, settled.adversarial
            state = TrainState(model, optimizer, objective, runtime, push=push, graphs=graphs, strategies=strategies)
            seed = settled.seed if settled.data_seed is None else settled.data_seed
            how = {"sampling": strategies.best_order(runtime.device), "ahead": 2 if on_gpu else 0, "pinned": on_gpu}
            size = chosen.per_device_train_batch_size
            batches = Batches(train, strategies.train_collate, size, seed=seed, **how)
            plan = make_plan(settled, batches, suite, has_validation=halve, on_gpu=on_gpu)
            watch.plan(plan.num_steps, float(plan.epoch_ends[0]))
            self.taken = []

            def evaluate(state: Any) -> Any:
                with strategies.whole():
                    some = rows.select(np.flatnonzero(home_of == fold - 1))
                    found = predict_rows(model, some, strategies.collate, runtime, max_rows=None if on_gpu else 64)
                return {"validation": (suite.compute(found.logits, found.labels), len(some))}

            for event in train_events(state, batches, plan, evaluate=evaluate if halve else None):
                if isinstance(event, StepDone):
                    self.taken.append(event)
                if last:
                    if isinstance(event, SafePoint) and clock.left() <= 0:
                        break
                    continue
                for listener in watch.listeners:
                    listener(event)
            if on_gpu:
                torch.cuda.synchronize(runtime.device)
            strategies.disable()
            return model, state.step

    return EngineTries()


def _folds(rows: Any, labels: Any, folds: int) -> Any:
    """The fold of each row, labels spread evenly."""
    order = np.random.default_rng(0).permutation(len(rows))
    if labels.task.value == "regression":
        keys = order
    else:
        keys = order[np.argsort(rows.labels[order], kind="stable")]
    home = np.empty(len(rows), dtype=np.int64)
    home[keys] = np.arange(len(rows)) % folds
    return home
