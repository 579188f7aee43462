"""`tunesmith search`: trials of one config, each an ordinary run in a folder of its own, shared by any number of processes.

The first trial is the config as it was given. Trials are judged by the validation rows; the test rows are not read for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config.convert import read_duration
from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import ConfigError, NumericsError, ResourceError, TunesmithError
from tunesmith.events import Evaluated, Event, RunStarted
from tunesmith.metrics.suite import greater_is_better
from tunesmith.pipeline.identity import is_finished
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import Watch
from tunesmith.report.compare import compare_runs
from tunesmith.runs.layout import SEARCH_RESULT, RunDir, read_metrics, trial_folder
from tunesmith.runs.sealed import retire
from tunesmith.runs.writing import make_folder, write_file
from tunesmith.tuning.clock import Clock, TimeUp
from tunesmith.tuning.space import Vary
from tunesmith.tuning.trial_store import JOURNAL, Claimed, TrialRecord, TrialStore

WAIT_SECONDS = 0.5
NOT_SHARED = ("output_dir", "run_name", "disable_tqdm", "time_budget", "cache_dir", "logging_steps")
"""Options in which the processes of one search may differ."""


class TrialPruned(TunesmithError):
    """A trial that was given up since it was behind the others."""


@dataclass(frozen=True)
class SearchPlan:
    """What is searched, how many trials, and how: sampler tpe or random, pruner median, hyperband or none."""

    space: tuple[Vary, ...]
    trials: int = 40
    sampler: str = "tpe"
    pruner: str = "median"


@dataclass(frozen=True)
class SearchResult:
    """`best` is the number of the best trial; `finished` is False when the time was up before all trials were done."""

    path: Path
    metric: str | None
    records: tuple[TrialRecord, ...]
    best: int | None
    seconds: float
    finished: bool
    verdict: str | None
    """The best trial beside the first, which is the config as given: a paired test in words."""


def search_options(config: RunConfig, plan: SearchPlan, watch: Watch) -> SearchResult:
    """Works on the search of a folder until every trial is done or the time is up. Call it again, or elsewhere, to join."""
    _check(config)
    folder = config.run_folder if config.output_dir else config.run_folder.with_name(f"{config.run_folder.name}-search")
    _require_search_folder(folder)
    shared = {name: value for name, value in to_dict(config).items() if name not in NOT_SHARED}
    shared |= {"vary": [v.text() for v in plan.space], "sampler": plan.sampler, "pruner": plan.pruner}
    store = TrialStore(folder, plan.space, shared, seed=config.seed, sampler=plan.sampler, pruner=plan.pruner)
    clock = Clock(folder / "clock", None if config.time_budget is None else read_duration(config.time_budget))
    finished = False
    try:
        _work(store, folder, config, plan.trials, clock, watch)
        finished = True
    except TimeUp:
        watch.say("The time budget is spent.")
    with store.alone():
        return _conclude(store.records(), folder, clock, finished)


def _check(config: RunConfig) -> None:
    if config.recipe == "best":
        raise ConfigError("a search of --recipe best is not built in", fix="Leave --recipe out: auto is trial 0.")
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        raise ConfigError(
            "a search with folds or seeds is not built in", fix="Leave them out; give the best values to train."
        )


def _require_search_folder(folder: Path) -> None:
    make_folder(folder)
    if not (folder / JOURNAL).exists() and any(p.name not in ("search.lock", "locks") for p in folder.iterdir()):
        raise ResourceError(
            "holds files and is not a search of tunesmith",
            where=str(folder),
            fix="Give a new or empty folder as --output_dir.",
        )


def _work(store: TrialStore, folder: Path, config: RunConfig, trials: int, clock: Clock, watch: Watch) -> None:
    waiting = False
    while True:
        clock.beat()
        claimed = store.claim(trials)
        if claimed is not None:
            try:
                _run_trial(store, claimed, _trial_config(config, folder, claimed), clock, watch)
            finally:
                claimed.lock.release()
            continue
        if all(one.state != "running" for one in store.records()):
            return
        if not waiting:
            watch.say("Waiting for trials of other processes.")
        waiting = True
        time.sleep(WAIT_SECONDS)


def _trial_config(config: RunConfig, folder: Path, claimed: Claimed) -> RunConfig:
    name = f"trial-{claimed.number}"
    options: dict[str, Any] = {
        "output_dir": str(folder / name),
        "run_name": f"{config.name}-{name}",
        "time_budget": None,
    }
    if config.eval_strategy is None:
        # At the same shares of every trial, whatever its number of epochs: else they cannot be compared half-way.
        options |= {"eval_strategy": "steps", "eval_steps": 0.25}
    return replace(config, **options, **claimed.options)


def _run_trial(store: TrialStore, claimed: Claimed, config: RunConfig, clock: Clock, watch: Watch) -> None:
    run = RunDir(config.run_folder)
    began = time.monotonic()
    listener = _make_listener(store, claimed, run)
    quiet = Watch(progress=clock.beat, listeners=[clock.beat, listener], pages=False)
    try:
        if not is_finished(run):
            finetune(config, watch=quiet, use_test=False)
        metric, value = trial_score(run)
        store.tell(claimed, "complete", value)
        shown = f"{metric} {abs(value):.4f}"
    except TrialPruned as error:
        store.tell(claimed, "pruned", None, error.problem)
        shown = error.problem
    except (NumericsError, ConfigError) as error:
        if claimed.number == 0:
            raise  # the config as given is wrong: no trial would do
        store.tell(claimed, "failed", None, error.line())
        shown = error.line()
    with store.alone():
        _keep_best_weights(store.records(), run.path.parent)
    options = ", ".join(f"{k} {v}" for k, v in claimed.options.items()) or "as given"
    watch.say(f"Trial {claimed.number}: {shown} ({options}; {time.monotonic() - began:.0f} s).")


def _make_listener(store: TrialStore, claimed: Claimed, run: RunDir) -> Callable[[Event], None]:
    """Reports each evaluation of a trial and ends a trial that is behind."""
    steps = 0

    def listen(event: Event) -> None:
        nonlocal steps
        if isinstance(event, RunStarted):
            steps = event.num_steps
        elif isinstance(event, Evaluated) and event.split == "validation":
            metric = main_metric_of(run, event.metrics)
            value = event.metrics.get(metric)
            share = round(100 * event.step / max(steps, event.step))
            last = steps > 0 and event.step >= steps
            if value is None or last:
                return
            if store.report(claimed, share, larger_is_better(metric, value)):
                raise TrialPruned(f"{metric} {value:.4f} after {share}% of its steps is behind the others")

    return listen


def main_metric_of(run: RunDir, metrics: dict[str, Any]) -> str:
    """The metric that a run is judged by."""
    chosen = load_config(run.config_file, need_data=False).metric_for_best_model
    return chosen or next(name for name in metrics if name != "loss")


def larger_is_better(metric: str, value: float) -> float:
    """The value, negative where a small one is good."""
    return value if metric != "loss" and greater_is_better(metric) else -value


def trial_score(run: RunDir) -> tuple[str, float]:
    """The metric and its value on the validation rows, turned so that larger is better."""
    scores = read_metrics(run.metrics_file).get("validation")
    if not scores:
        raise ConfigError(
            "a search needs labelled validation rows", fix="Give --validation_file, or leave a share of train."
        )
    metric = main_metric_of(run, scores)
    value = scores[metric]["value"]
    if value is None:
        raise NumericsError(f"{metric} is not defined on the validation rows")
    return metric, larger_is_better(metric, float(value))


def best_of_records(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The complete trial with the largest score; of equals the first."""
    done = [one for one in records if one.state == "complete" and one.value is not None]
    return max(done, key=lambda one: (one.value or 0.0, -one.number), default=None)


def _keep_best_weights(records: Sequence[TrialRecord], folder: Path) -> None:
    """A search keeps one model on disk, that of the best trial so far; scores, journal and predictions of all."""
    best = best_of_records(records)
    for one in records:
        if one.state == "running" or one is best:
            continue
        run = RunDir(trial_folder(folder, one.number))
        for path in (*run.checkpoints(), run.best, *([run.model] if best is not None else [])):
            if path.is_dir():
                retire(path)


def _conclude(records: Sequence[TrialRecord], folder: Path, clock: Clock, finished: bool) -> SearchResult:
    best = best_of_records(records)
    metric = verdict = None
    if best is not None:
        path = trial_folder(folder, best.number)
        metric, _ = trial_score(RunDir(path))
        if best.number != 0 and records[0].state == "complete":
            verdict = compare_runs([folder / "trial-0", path], split="validation").tests[0].sentence
    seconds = clock.spent()
    table: dict[str, Any] = {
        "metric": metric,
        "best": None if best is None else best.number,
        "beside_the_first": verdict,
    }
    table |= {"seconds": seconds, "finished": finished, "trials": [asdict(one) for one in records]}
    write_file(folder / SEARCH_RESULT, json.dumps(table, indent=1).encode())
    number = None if best is None else best.number
    return SearchResult(folder, metric, tuple(records), number, seconds, finished, verdict)
