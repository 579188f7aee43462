"""`tunesmith search`: Optuna trials of one config, each an ordinary run in its own folder, shared by any number of processes.

The first trial uses the config unchanged. Trials are compared on the validation examples; test examples are not read.

The study is a journal file in the search folder. Each trial has a lock file, held by the process that works on it. The kernel
releases it when that process dies, and the next process takes the trial over, with the same number and values.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.load import convert, raise_problems, read_duration, suggest
from tunesmith.config.options import RunConfig, list_options, to_dict
from tunesmith.errors import CheckpointError, ConfigError, NumericsError, ResourceError
from tunesmith.events import Evaluated, Event, RunStarted
from tunesmith.files import make_folder, open_in_place, user_files, write_file
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.train import RunObserver, finetune
from tunesmith.runs.folder import (
    SEARCH_RESULT,
    RunDir,
    RunLock,
    delete_folder,
    end_of,
    locked,
    read_holder,
    trial_folder,
)
from tunesmith.tuning.trials import (
    Clock,
    TimeUp,
    TrialPruned,
    damaged,
    inputs_identity,
    larger_is_better,
    main_metric_of,
    require_same_inputs,
    trial_score,
)

USUAL = (
    "learning_rate=1e-5..3e-4",
    "num_train_epochs=2,3,5,8",
    "per_device_train_batch_size=8,16,32",
    "layerwise_lr_decay=0.7..1.0",
    "warmup_steps=0.0..0.3",
)
"""The default search space; options that are set are not varied."""
FIXED = ("output_dir", "run_name", "folds", "fold", "seeds", "train_file", "validation_file", "test_file", "data_seed")
"""Options that cannot be varied: trials must be compared on the same examples."""
NOT_SHARED = ("output_dir", "run_name", "disable_tqdm", "time_budget", "cache_dir", "logging_steps")
"""Options in which the processes of one search may differ."""
JOURNAL = "search.journal"
START_UP = 10
"""Trials that are drawn at random before TPE uses the scores."""
WAIT_SECONDS = 0.5
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
"""Names of the states in which a trial ends, by Optuna's name."""


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
        """Whether to sample on a log scale: for ranges of a factor of ten or more."""
        return not self.values and self.low > 0 and self.high / self.low >= 10


def read_space(words: Iterable[str], config: RunConfig) -> tuple[Vary, ...]:
    """Parse `--vary NAME=LOW..HIGH NAME=a,b,c`; all problems are listed together."""
    words = tuple(words)
    if not words:
        useless = {"num_train_epochs"} if config.max_steps > 0 else set()
        names = {name for name in list_options() if getattr(config, name) is None} - useless
        words = tuple(word for word in USUAL if word.partition("=")[0] in names)
    found, problems = [], []
    for word in words:
        try:
            found.append(_read_word(word))
        except ValueError as error:
            problems.append(f"--vary {word}: {error}")
    given = [one.name for one in found]
    problems += [f"--vary {name}: is set twice. Set it once" for name in dict.fromkeys(given) if given.count(name) > 1]
    if not found and not problems:
        problems.append("every option of the default search space is set. Set --vary NAME=LOW..HIGH")
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
        raise ValueError("cannot be varied: trials are compared on the same examples. Remove it")
    if not equals or not text:
        raise ValueError(f"has no values. Write {name}=LOW..HIGH or {name}=a,b,c")
    if ".." not in text:
        return Vary(name, tuple(convert(part.strip(), option.hint) for part in text.split(",")))
    ends = [convert(part.strip(), option.hint) for part in text.split("..", 1)]
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends) or not ends[0] < ends[1]:
        raise ValueError("is not a range of numbers. Write LOW..HIGH")
    whole = all(isinstance(end, int) for end in ends)
    return Vary(name, low=ends[0], high=ends[1], whole=whole)


@dataclass(frozen=True)
class SearchPlan:
    """The search space, the number of trials, and whether trials that are behind the median are ended."""

    space: tuple[Vary, ...]
    trials: int = 40
    prune: bool = True


@dataclass(frozen=True)
class TrialRecord:
    """One trial. For `value`, larger is better; `state` is running, complete, pruned or failed."""

    number: int
    state: str
    value: float | None
    options: dict[str, Any]
    seconds: float | None
    why: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """`best` is the number of the best trial; `finished` is False if the time was up before all trials were done."""

    path: Path
    metric: str | None
    trials: tuple[TrialRecord, ...]
    best: int | None
    seconds: float
    finished: bool


def search_options(config: RunConfig, plan: SearchPlan, observer: RunObserver) -> SearchResult:
    """Run trials until all are done or the time is up. The same command resumes the search, or joins it from another process."""
    if config.recipe == "best":
        raise ConfigError("search doesn't support --recipe best", fix="Remove --recipe: the first trial uses auto.")
    if config.trains_several:
        raise ConfigError(
            "search doesn't support --folds and --seeds", fix="Pass the best values to `tunesmith train`."
        )
    folder = config.run_folder if config.output_dir else config.run_folder.with_name(f"{config.run_folder.name}-search")
    make_folder(folder)
    strangers = [name for name in user_files(folder) if name not in ("search.lock", "locks")]
    if strangers and not (folder / JOURNAL).exists():
        raise ResourceError(
            f"contains {strangers[0]} and is not a tunesmith search",
            where=str(folder),
            fix="Set --output_dir to a new or empty folder.",
        )
    shared = {name: value for name, value in to_dict(config).items() if name not in NOT_SHARED}
    shared |= {"vary": list(map(repr, plan.space)), "prune": plan.prune}
    store = TrialStore(folder, plan, shared, config.seed)
    clock = Clock(folder / "clock.json", None if config.time_budget is None else read_duration(config.time_budget))
    varied = ", ".join(vary.name for vary in plan.space)
    observer.log(f"Search: {plan.trials} trials in {folder}. Trial 0 uses your config, the others vary {varied}.")
    try:
        _run_trials(store, config, clock, observer)
        finished = True
    except TimeUp:
        finished = False
        observer.log("The time budget is spent.")
    clock.save()
    with store.alone():
        return _conclude(store.records(), folder, clock, finished)


def _run_trials(store: TrialStore, config: RunConfig, clock: Clock, observer: RunObserver) -> None:
    waiting = False
    while True:
        clock.beat()
        claimed = store.claim()
        if claimed is not None:
            try:
                store.require_same_inputs(inputs_identity(config, read_run_data(config, {}, observer.progress)))
                _run_trial(store, claimed, config, clock, observer)
            finally:
                claimed.lock.release()
            continue
        if all(one.state != "running" for one in store.records()):
            return
        if not waiting:
            observer.log("Waiting for trials of other processes.")
        waiting = True
        time.sleep(WAIT_SECONDS)


def _run_trial(store: TrialStore, claimed: Claimed, config: RunConfig, clock: Clock, observer: RunObserver) -> None:
    began, run = time.monotonic(), RunDir(trial_folder(store.folder, claimed.number))
    steps = 0

    def report(event: Event) -> None:
        """Report each evaluation to the pruner and stop a trial that is behind."""
        nonlocal steps
        if isinstance(event, RunStarted):
            steps = event.num_steps
        elif isinstance(event, Evaluated) and event.split == "validation" and event.step < steps:
            metric = main_metric_of(run, event.metrics)
            value, share = event.metrics.get(metric), round(100 * event.step / steps)
            if value is not None and store.report(claimed, share, larger_is_better(metric, value)):
                raise TrialPruned(f"{metric} {value:.4f} after {share}% of its steps is behind the others")

    options: dict[str, Any] = {
        "output_dir": str(run.path),
        "run_name": f"{config.name}-{run.name}",
        "time_budget": None,
    }
    if config.eval_strategy is None:
        # At the same fractions of every trial, whatever its number of epochs: else the pruner cannot compare them.
        options |= {"eval_strategy": "steps", "eval_steps": 0.25}
    quiet = RunObserver(progress=clock.beat, listeners=[clock.beat, report], pages=False)
    try:
        if end_of(run) is None:
            finetune(replace(config, **options, **claimed.options), observer=quiet, use_test=False)
        metric, value = trial_score(run)
        store.tell(claimed, "complete", value)
        shown = f"{metric} {abs(value):.4f}"
    except TrialPruned as error:
        shown = error.problem
        store.tell(claimed, "pruned", None, shown)
    except (NumericsError, ConfigError) as error:
        if claimed.number == 0:
            raise  # the config is wrong: no trial can work
        shown = error.line()
        store.tell(claimed, "failed", None, shown)
    with store.alone():
        _keep_best_weights(store.records(), store.folder)
    values = ", ".join(f"{k} {v}" for k, v in claimed.options.items()) or "as configured"
    observer.log(f"Trial {claimed.number}: {shown} ({values}; {time.monotonic() - began:.0f} s).")


def _best_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the complete trial with the best score; the first one of equals."""
    done = [one for one in records if one.state == "complete" and one.value is not None]
    return max(done, key=lambda one: (one.value or 0.0, -one.number), default=None)


def _keep_best_weights(records: Sequence[TrialRecord], folder: Path) -> None:
    """Keep the model of the best trial so far; of the others only scores, event log and predictions."""
    best = _best_of(records)
    for one in records:
        if one.state == "running" or one is best:
            continue
        run = RunDir(trial_folder(folder, one.number))
        for path in (*run.checkpoints(), *([run.model] if best is not None else [])):
            if path.is_dir():
                delete_folder(path)


def _conclude(records: Sequence[TrialRecord], folder: Path, clock: Clock, finished: bool) -> SearchResult:
    best = _best_of(records)
    number, metric = None, None
    if best is not None:
        number, (metric, _) = best.number, trial_score(RunDir(trial_folder(folder, best.number)))
    found = SearchResult(folder, metric, tuple(records), number, clock.spent(), finished)
    table = {**asdict(found), "path": str(folder)}
    write_file(folder / SEARCH_RESULT, json.dumps(table, indent=1).encode())
    return found


@dataclass
class Claimed:
    """A trial that this process works on until the lock is released."""

    number: int
    options: dict[str, Any]
    trial: Any
    lock: RunLock = field(repr=False)


class TrialStore:
    """The Optuna study of a search folder. All processes of one search must agree on `shared` options."""

    def __init__(self, folder: Path, plan: SearchPlan, shared: dict[str, Any], seed: int) -> None:
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise ConfigError("search requires the package optuna", fix="pip install 'tunesmith[search]'") from None

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self.folder, self._plan, self._seed = folder, plan, seed
        self._lock_file = folder / "search.lock"
        make_folder(folder / "locks")
        with self.alone():
            journal = folder / JOURNAL
            _require_intact(journal)
            lock: Any = JournalLock(journal)
            pruner = optuna.pruners.MedianPruner(n_startup_trials=5) if plan.prune else optuna.pruners.NopPruner()
            try:
                self._study = optuna.create_study(
                    storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal), lock_obj=lock)),
                    study_name="search",
                    direction="maximize",
                    load_if_exists=True,
                    pruner=pruner,
                )
                known_trials = self.records()
            except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
                raise damaged(journal, f"cannot be read ({type(error).__name__}: {error})") from None
            for one in known_trials:
                scored, drawn = isinstance(one.value, float), bool(one.options) or one.number == 0
                if (one.state == "complete" and not scored) or (one.state != "running" and not drawn):
                    raise damaged(journal, f"lacks the {'options' if scored else 'score'} of trial {one.number}")
            if not known_trials and any(folder.glob("trial-*/journal.jsonl")):
                raise damaged(journal, "lists no trials, but the folder contains some")
            known = self._study.user_attrs.get("identity")
            if known is None:
                self._study.set_user_attr("identity", shared)
            elif known != shared:
                names = sorted(n for n in {*known, *shared} if known.get(n) != shared.get(n))
                raise CheckpointError(
                    f"contains a search with a different {', '.join(names)}",
                    where=str(folder),
                    fix="Use the same options, or another --output_dir.",
                )

    def require_same_inputs(self, inputs: dict[str, str]) -> None:
        """Store the identity of data and base model with the first trial; raise a CheckpointError if it has changed."""
        known = self._study.user_attrs.get("inputs")
        if known is None:
            self._study.set_user_attr("inputs", inputs)
        else:
            require_same_inputs(known, inputs, self.folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude the other processes of the search."""
        with locked(self._lock_file):
            yield

    def claim(self) -> Claimed | None:
        """Return a trial that no process works on, an unfinished one first; None if there is none."""
        locks = self.folder / "locks"
        with self.alone():
            found = self._study.get_trials(deepcopy=False)
            left = [one for one in found if not one.state.is_finished()]
            free = next((one for one in left if read_holder(locks / f"trial-{one.number}") is None), None)
            if free is None and len(found) >= self._plan.trials:
                return None
            trial = self._optuna.trial.Trial(self._study, free._trial_id) if free else self._study.ask()
            lock = RunLock(locks / f"trial-{trial.number}")
            lock.__enter__()
            return Claimed(trial.number, self._draw(trial), trial, lock)

    def _draw(self, trial: Any) -> dict[str, Any]:
        """Return the values of a trial; none for the first one, which uses the config unchanged."""
        options: dict[str, Any] = {}
        for at, vary in enumerate(self._plan.space if trial.number else ()):
            # A sampler that depends only on seed, trial and option, not on the process.
            seed = int(np.random.SeedSequence([self._seed, trial.number, at]).generate_state(1)[0])
            samplers = self._optuna.samplers
            self._study.sampler = (
                samplers.RandomSampler(seed=seed)
                if trial.number <= START_UP
                else samplers.TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)
            )
            if vary.values:
                options[vary.name] = vary.values[trial.suggest_categorical(vary.name, list(range(len(vary.values))))]
            elif vary.whole:
                options[vary.name] = trial.suggest_int(vary.name, int(vary.low), int(vary.high), log=vary.log)
            else:
                value = trial.suggest_float(vary.name, vary.low, vary.high, log=vary.log)
                options[vary.name] = float(f"{value:.4g}")
        trial.set_user_attr("options", options)
        return options

    def report(self, claimed: Claimed, at: int, value: float) -> bool:
        """Store an intermediate score at `at` percent of the steps; return whether the trial should be pruned."""
        if at not in self._study._storage.get_trial(claimed.trial._trial_id).intermediate_values:
            claimed.trial.report(value, at)
        return bool(claimed.trial.should_prune())

    def tell(self, claimed: Claimed, state: str, value: float | None, why: str | None = None) -> None:
        """Store the end of a trial; only a complete one has a value."""
        if why is not None:
            claimed.trial.set_user_attr("why", why)
        state = next(name for name, ours in STATES.items() if ours == state)
        self._study.tell(claimed.trial, value, state=self._optuna.trial.TrialState[state])

    def records(self) -> list[TrialRecord]:
        """Return all trials by number."""
        found = []
        for one in self._study.get_trials(deepcopy=False):
            options = one.user_attrs.get("options", {})
            seconds = one.duration.total_seconds() if one.duration is not None else None
            state = STATES.get(one.state.name, "running")
            found.append(TrialRecord(one.number, state, one.value, options, seconds, one.user_attrs.get("why")))
        return found


class JournalLock:
    """A lock of Optuna's journal that dies with its holder (Optuna's own waits 30 s for a killed process).

    An incomplete last line, left by a full disk, is removed before the next one is written.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._stack = ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._stack.enter_context(locked(self._journal.with_name(f"{self._journal.name}.lock")))
        with open(open_in_place(self._journal), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            tail = os.pread(file.fileno(), 65536, max(0, size - 65536))
            if tail and not tail.endswith(b"\n"):
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Release the lock."""
        self._stack.close()


def _require_intact(journal: Path) -> None:
    """Raise a CheckpointError that names the first damaged line; an incomplete last line is no damage."""
    if not journal.is_file():
        return
    for number, line in enumerate(journal.read_bytes().split(b"\n")[:-1], 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or entry.get("op_code") not in range(11):
            raise damaged(journal, f"line {number} is damaged")
