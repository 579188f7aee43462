"""What a search varies: options of a run with a range or a list of values."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith.config.load import convert
from tunesmith.config.validate import read_duration
from tunesmith.config.load import load_config, raise_problems, suggest
from tunesmith.config.options import RunConfig, list_options, to_dict
from tunesmith.errors import CheckpointError, ConfigError, NumericsError, ResourceError, TunesmithError
from tunesmith.events import Evaluated, Event, RunStarted
from tunesmith.metrics.table import greater_is_better
from tunesmith.pipeline.identity import is_finished
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import Watch
from tunesmith.report.compare import compare_runs
from tunesmith.runs.folder import SEARCH_RESULT, RunDir, read_metrics, trial_folder
from tunesmith.runs.lock import RunLock, locked, read_holder
from tunesmith.runs.manifest import retire
from tunesmith.runs.writing import make_folder, open_in_place, write_file
from tunesmith.tuning.clock import Clock, TimeUp

USUAL = (
    "learning_rate=1e-5..3e-4",
    "num_train_epochs=2,3,5,8",
    "per_device_train_batch_size=8,16,32",
    "layerwise_lr_decay=0.7..1.0",
    "warmup_steps=0.0..0.3",
)
"""What is varied when nothing is said, less the options that have a value already."""
FIXED = ("output_dir", "run_name", "folds", "fold", "seeds", "train_file", "validation_file", "test_file", "data_seed")
"""Options that a search does not vary: the trials would not be judged by the same rows, or not be found."""


@dataclass(frozen=True)
class Vary:
    """One option: a list of `values`, or a range from `low` to `high`."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether factors count, not differences: from a tenfold range on."""
        return not self.values and self.low > 0 and self.high / self.low >= 10

    def text(self) -> str:
        """As it is written on the command line."""
        values = ",".join(map(str, self.values)) if self.values else f"{self.low:g}..{self.high:g}"
        return f"{self.name}={values}"


def read_space(words: Iterable[str], config: RunConfig) -> tuple[Vary, ...]:
    """The space of `--vary NAME=LOW..HIGH NAME=a,b,c`; all problems are listed at once."""
    words = tuple(words)
    if not words:
        words = tuple(w for w in USUAL if getattr(config, w.partition("=")[0]) is None)
    found, problems = [], []
    for word in words:
        try:
            found.append(_read_word(word))
        except ValueError as error:
            problems.append(f"--vary {word}: {error}")
    names = [v.name for v in found]
    problems += [
        f"--vary {name}: is given twice. Give it once" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if not found and not problems:
        problems.append("every option that a search varies by itself is given. Say what to vary: --vary NAME=LOW..HIGH")
    raise_problems(problems)
    return tuple(found)


def _read_word(word: str) -> Vary:
    name, equals, text = word.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    option = list_options().get(name)
    if option is None:
        hint = suggest(name, tuple(list_options()))
        raise ValueError(f"unknown option{f'. {hint}' if hint else '. `tunesmith train --help` lists all'}")
    if name in FIXED:
        raise ValueError("cannot be varied: trials are compared on the same rows. Leave it out")
    if not equals or not text:
        raise ValueError(f"has no values. Write {name}=LOW..HIGH or {name}=a,b,c")
    if ".." not in text:
        return Vary(name, tuple(convert(part.strip(), option.hint) for part in text.split(",")))
    ends = [convert(part.strip(), option.hint) for part in text.split("..", 1)]
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends) or not ends[0] < ends[1]:
        raise ValueError("is not a range of numbers. Write LOW..HIGH")
    whole = all(isinstance(end, int) for end in ends)
    return Vary(name, low=ends[0], high=ends[1], whole=whole)


JOURNAL = "search.journal"
START_UP = 10
"""Trials that are drawn at random before TPE looks at what they scored."""

Ending = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class TrialRecord:
    """One trial as it stands. `value` is the score, larger is better; `state`: running, complete, pruned, failed."""

    number: int
    state: str
    value: float | None
    options: dict[str, Any]
    seconds: float | None
    why: str | None = None


@dataclass
class Claimed:
    """A trial that this process works on until `release`."""

    number: int
    options: dict[str, Any]
    trial: Any
    lock: RunLock = field(repr=False)


class JournalLock:
    """The lock of Optuna's journal: one that dies with its holder (Optuna's own waits 30 s for a killed process).

    A last line that a full disk cut is removed before the next is written: it would make the journal unreadable.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._stack = ExitStack()

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._stack.enter_context(locked(self._journal.with_name(f"{self._journal.name}.lock")))
        with open(open_in_place(self._journal), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            tail = os.pread(file.fileno(), 65536, max(0, size - 65536))
            if tail and not tail.endswith(b"\n"):
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Gives it back."""
        self._stack.close()


class TrialStore:
    """The study of a search folder. `identity` is what all processes of one search must agree on."""

    def __init__(
        self, folder: Path, space: tuple[Vary, ...], identity: dict[str, Any], *, seed: int, sampler: str, pruner: str
    ) -> None:
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise ConfigError("a search needs the package optuna", fix="pip install 'tunesmith[search]'") from None

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._folder, self._space, self._seed, self._sampler = folder, space, seed, sampler
        self._lock_file = folder / "search.lock"
        make_folder(folder / "locks")
        with locked(self._lock_file):
            journal = folder / JOURNAL
            lock: Any = JournalLock(journal)
            backend = JournalFileBackend(str(journal), lock_obj=lock)
            pruners = {
                "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5),
                # Trials report at 25, 50 and 75% of their steps: they are halved at 25 and at 50.
                "hyperband": lambda: optuna.pruners.HyperbandPruner(
                    min_resource=25, max_resource=100, reduction_factor=2
                ),
                "none": optuna.pruners.NopPruner,
            }
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="search",
                direction="maximize",
                load_if_exists=True,
                pruner=pruners[pruner](),
            )
            known = self._study.user_attrs.get("identity")
            if known is None:
                self._study.set_user_attr("identity", identity)
            elif known != identity:
                names = sorted(n for n in {*known, *identity} if known.get(n) != identity.get(n))
                raise CheckpointError(
                    f"holds a search that differs in {', '.join(names)}",
                    where=str(folder),
                    fix="Give the same options, or another --output_dir.",
                )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process of the search looks for work or writes results."""
        with locked(self._lock_file):
            yield

    def claim(self, limit: int) -> Claimed | None:
        """A trial that no process works on, an unfinished one first; None when there is none left now."""
        with self.alone():
            found = self._study.get_trials(deepcopy=False)
            for one in found:
                file = self._folder / "locks" / f"trial-{one.number}"
                if not one.state.is_finished() and read_holder(file) is None:
                    return self._take(self._optuna.trial.Trial(self._study, one._trial_id), file)
            if len(found) >= limit:
                return None
            self._study.sampler = self._sampler_for(len(found), 0)
            trial = self._study.ask()
            return self._take(trial, self._folder / "locks" / f"trial-{trial.number}")

    def _take(self, trial: Any, file: Path) -> Claimed:
        lock = RunLock(file)
        lock.__enter__()
        return Claimed(trial.number, self._draw(trial), trial, lock)

    def _draw(self, trial: Any) -> dict[str, Any]:
        """The values of a trial. The first trial has none: it is the config as it was given, to compare with."""
        options: dict[str, Any] = {}
        for at, vary in enumerate(self._space if trial.number else ()):
            self._study.sampler = self._sampler_for(trial.number, at)
            if vary.values:
                options[vary.name] = vary.values[trial.suggest_categorical(vary.name, list(range(len(vary.values))))]
            elif vary.whole:
                options[vary.name] = trial.suggest_int(vary.name, int(vary.low), int(vary.high), log=vary.log)
            else:
                value = trial.suggest_float(vary.name, vary.low, vary.high, log=vary.log)
                options[vary.name] = float(f"{value:.4g}")
        return options

    def _sampler_for(self, number: int, at: int) -> Any:
        """Its random numbers depend on seed, trial and option alone, not on the process or on what it drew before."""
        seed = int(np.random.SeedSequence([self._seed, number, at]).generate_state(1)[0])
        if self._sampler == "random" or number <= START_UP:
            return self._optuna.samplers.RandomSampler(seed=seed)
        return self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)

    def report(self, claimed: Claimed, at: int, value: float) -> bool:
        """Notes how a trial stands at its evaluation `at`; True when it is without prospects."""
        if at not in self._study._storage.get_trial(claimed.trial._trial_id).intermediate_values:
            claimed.trial.report(value, at)
        return bool(claimed.trial.should_prune())

    def tell(self, claimed: Claimed, ending: Ending, value: float | None, why: str | None = None) -> None:
        """The one end of a trial."""
        states = self._optuna.trial.TrialState
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[ending]
        if why is not None:
            claimed.trial.set_user_attr("why", why)
        self._study.tell(claimed.trial, value if ending == "complete" else None, state=state)

    def records(self) -> list[TrialRecord]:
        """Every trial, by number."""
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        found = []
        for one in self._study.get_trials(deepcopy=False):
            options = {
                v.name: v.values[x] if v.values else x for v in self._space if (x := one.params.get(v.name)) is not None
            }
            options = {n: float(f"{x:.4g}") if isinstance(x, float) else x for n, x in options.items()}
            seconds = one.duration.total_seconds() if one.duration is not None else None
            why = one.user_attrs.get("why")
            found.append(
                TrialRecord(one.number, names.get(one.state.name, "running"), one.value, options, seconds, why)
            )
        return found


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
