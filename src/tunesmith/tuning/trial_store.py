"""The trials of a search, as an Optuna study in a journal file of the search folder. Home of Optuna.

Several processes share the study. Each trial has a lock file, held by the process that works on it; the kernel releases it when
the process dies, and the next process that asks for work takes the trial over, with the same number and values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.runs.ownership import RunLock, locked, read_holder
from tunesmith.runs.writing import make_folder, open_in_place
from tunesmith.tuning.space import Vary

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
