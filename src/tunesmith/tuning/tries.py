"""The runs that `--recipe best` is made of: candidates trained on folds or on all rows, each once, within the time that is left.

Every run is an ordinary one in a folder of its own below `tries/`. `tries/record.json` says how each ended: the same command
finds the finished ones and resumes the one that was under way.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig
from tunesmith.errors import ConfigError, NumericsError
from tunesmith.events import Evaluated, Event, StepDone
from tunesmith.files import read_json
from tunesmith.pipeline.identity import is_finished
from tunesmith.pipeline.pair_warmup import PAIRS_IN_A_STEP
from tunesmith.pipeline.recipe import NAMES
from tunesmith.pipeline.start_clock import StartClock
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import Watch
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import retire
from tunesmith.runs.writing import write_file
from tunesmith.tuning.blending import HeldOut, cook_fold, join_folds, read_held_out
from tunesmith.tuning.clock import Clock, TimeUp
from tunesmith.tuning.outcomes import MARGIN, Outcome, passes_over
from tunesmith.tuning.search import TrialPruned, larger_is_better, main_metric_of, trial_score
from tunesmith.tuning.variants import Variant

FOLDS = 3
"""More folds cost more for the same rows: the time is better spent on more ways to train."""
RUNGS = (25, 50)
"""Percent of its steps at which a candidate is compared with the others."""
WARM_READS, TIMED_READS = 3, 5
"""Reads of step times that are left out, as kernels are made in them, and that are counted (on a GPU one for several steps)."""
SAVE_STEPS = 500
"""A shorter run starts anew after a crash: its checkpoints would cost more."""


class Tries:
    """Trains candidates. `rows` are all training rows; without `folds` the given validation rows are held out."""

    def __init__(
        self,
        config: RunConfig,
        data: Mapping[str, Any],
        folder: Path,
        clock: Clock,
        watch: Watch,
        rows: int,
        folds: bool,
    ) -> None:
        self.config, self.folder, self.clock, self.rows = config, folder, clock, rows
        self.folds: tuple[int | None, ...] = tuple(range(1, FOLDS + 1)) if folds else (None,)
        self._data, self._watch = {f"{split}_data": table for split, table in data.items()}, watch
        self.start = StartClock()
        """Of the run that is under way, or was last."""
        self._file = folder / "record.json"
        self.record: dict[str, Any] = read_json(self._file) if self._file.is_file() else {"runs": {}, "rungs": {}}

    def note(self, key: str, value: Any) -> Any:
        """Keeps a decision: after a crash it is not made anew."""
        self.record[key] = value
        write_file(self._file, json.dumps(self.record, indent=1).encode())
        return value

    def path(self, candidate: Variant, fold: int | None, *, all_rows: bool = False) -> Path:
        """The run folder of a candidate."""
        part = "all" if all_rows else "held-out" if fold is None else f"fold-{fold}"
        return self.folder / f"{candidate.name}-{part}"

    def outcome(self, candidate: Variant, fold: int | None) -> Outcome | None:
        """How that run ended; None: it was not trained, or not to its end."""
        found = self.record["runs"].get(self.path(candidate, fold).name)
        return None if found is None else Outcome(**found)

    def done_folds(self, candidate: Variant) -> list[int | None]:
        """The folds whose rows this candidate has predicted."""
        return [k for k in self.folds if (found := self.outcome(candidate, k)) is not None and found.state == "done"]

    def train(self, candidate: Variant, fold: int | None, *, halve: bool = False, all_rows: bool = False) -> Outcome:
        """Trains what is not trained yet; TimeUp when the time is over meanwhile."""
        path = self.path(candidate, fold, all_rows=all_rows)
        known = self.record["runs"].get(path.name)
        if known is not None:
            return Outcome(**known)
        if self.record.get("deploying") and not all_rows:
            raise TimeUp  # the last model is under way: what it is made of is settled
        began = time.monotonic()
        found = self._finetune(candidate, RunDir(path), fold, halve, all_rows)
        found = replace(found, seconds=time.monotonic() - began, **self.start.facts())
        self.note("runs", {**self.record["runs"], path.name: asdict(found)})
        self._clear(RunDir(path), found)
        shown = found.why if found.metric is None else f"{found.metric} {abs(found.score or 0.0):.4f}"
        self._watch.say(f"Try {path.name}: {shown or 'trained'} ({candidate.said}; {found.seconds:.0f} s).")
        return found

    def _finetune(self, candidate: Variant, run: RunDir, fold: int | None, halve: bool, all_rows: bool) -> Outcome:
        watch = self._make_watch(candidate, run, halve)
        try:
            if not is_finished(run):
                config = self.config_for(candidate, run.path, fold, halve=halve, all_rows=all_rows)
                finetune(config, watch=watch, use_test=False, **self._data)
            metric, score = (None, None) if all_rows else trial_score(run)
        except TrialPruned as error:
            return Outcome("stopped", why=error.problem)
        except (NumericsError, ConfigError) as error:
            if candidate.name == "auto":
                raise  # the config as given is wrong: no candidate would do
            return Outcome("failed", why=error.line())
        taken = [event for event in read_journal(run.journal_file) if isinstance(event, StepDone)]
        decided = load_config(run.config_file, need_data=False)
        size = decided.decided.per_device_train_batch_size * decided.gradient_accumulation_steps
        epochs = taken[-1].epoch if taken else 0.0
        rows = round(sum(step.examples for step in taken) / epochs) if epochs else size
        seconds = sum(step.seconds for step in taken)
        return Outcome("done", metric, score, None, 0.0, seconds, len(taken), rows, epochs)

    def config_for(
        self, candidate: Variant, path: Path, fold: int | None, *, halve: bool = False, all_rows: bool = False
    ) -> RunConfig:
        """The config of one run. Its weights are those after the last step: the held-out rows choose nothing within it."""
        rows = self.rows if all_rows or fold is None else self.rows * (FOLDS - 1) // FOLDS
        options: dict[str, Any] = {
            "recipe": "auto",
            "time_budget": None,
            "output_dir": str(path),
            "run_name": f"{self.config.name}-{path.name}",
            "folds": None if fold is None or all_rows else FOLDS,
            "fold": None if all_rows else fold,
            "load_best_model_at_end": False,
            "early_stopping_patience": None,
            "train_sample_size": 0,
            "save_strategy": "steps" if self._steps(candidate, rows) > SAVE_STEPS else "no",
            "save_steps": SAVE_STEPS,
            "report_to": ("none",),
            **({} if all_rows else candidate.settled),
            **candidate.options,
        }
        options |= {"eval_strategy": "steps", "eval_steps": RUNGS[0] / 100} if halve else {"eval_strategy": "no"}
        if all_rows and self.folds != (None,):
            options["validation_split_fraction"] = 0.0
        return replace(self.config, **options)

    def _steps(self, candidate: Variant, rows: int) -> float:
        per_pass = rows / (self._batch(candidate) * self.config.gradient_accumulation_steps)
        return max(per_pass * self._epochs(candidate, rows), self.config.max_steps)

    def _epochs(self, candidate: Variant, rows: int) -> float:
        return passes_over(rows, self.config, self._batch(candidate))

    def _batch(self, candidate: Variant) -> int:
        options = {**candidate.settled, **candidate.options}
        return int(options.get("per_device_train_batch_size") or self.config.decided.per_device_train_batch_size)

    def forecast(self, candidate: Variant, like: Outcome, *, all_rows: bool = False) -> float:
        """Seconds that a run will take, from its own on another fold or one of the same base model.

        Adversarial steps take up to twice the time of those of `auto`: `_require_time` sees that after a few of them.
        """
        rows = self.rows if all_rows or self.folds == (None,) else self.rows * (FOLDS - 1) // FOLDS
        steps = like.row_seconds * rows * self._epochs(candidate, rows)
        if self.config.max_steps > 0:
            steps = like.step_seconds
        pairs = {**candidate.settled, **candidate.options}.get("pair_start", like.start_steps) or 0
        return like.other_seconds + steps + like.start_seconds * pairs / max(like.start_steps, 1)

    def held_out(self, variant: Variant, folds: Sequence[int | None]) -> HeldOut:
        """The rows of these folds, predicted by the models that did not see them."""
        return read_held_out([self.path(variant, fold) for fold in folds])

    def cook(self, members: Sequence[Variant], weights: Sequence[float], folds: Sequence[int | None]) -> HeldOut | None:
        """The same by the soup of the members' models of each fold; None where their weights do not fit each other."""
        parts = []
        for fold in folds:
            runs = [self.path(one, fold) for one in members]
            target = self.folder / f"soup-{'held-out' if fold is None else fold}"
            parts.append(cook_fold(target, runs, weights, use_cpu=self.config.use_cpu))
        known = [one for one in parts if one is not None]
        return join_folds(known) if len(known) == len(parts) else None

    def decided(self, candidate: Variant) -> dict[str, Any]:
        """What the recipe chose for the first run of a candidate, but for the number of passes."""
        config = load_config(RunDir(self.path(candidate, self.folds[0])).config_file, need_data=False)
        return {name: getattr(config, name) for name in NAMES if name != "num_train_epochs"}

    def _make_watch(self, candidate: Variant, run: RunDir, halve: bool) -> Watch:
        steps, reads, judged = 0, list[float](), False
        self.start = StartClock()
        last = candidate.expected and self.outcome(candidate, self.folds[0]) is None

        def progress(stage: str, done: int, total: int) -> None:
            if self.start.note(stage, done, total):
                self._require_time_after_start(candidate, last)
            self.clock.beat()

        def plan(num_steps: int, per_epoch: float) -> None:
            nonlocal steps
            steps = num_steps

        def listen(event: Event) -> None:
            nonlocal judged
            if isinstance(event, StepDone):
                if event.seconds not in reads[-1:]:
                    reads.append(event.seconds)
                if not judged and len(reads) >= WARM_READS + TIMED_READS and event.step >= steps // 20:
                    judged = True
                    self._require_time(statistics.median(reads[WARM_READS:]), steps - event.step, steps, last)
            elif isinstance(event, Evaluated) and event.split == "validation" and halve and event.step < steps:
                self._require_rank(candidate, run, event, round(100 * event.step / steps))

        return Watch(progress=progress, plan=plan, listeners=[self.clock.beat, listen], pages=False)

    def _require_time(self, step_seconds: float, to_do: int, steps: int, last: bool) -> None:
        """A run that would end too late is given up at a twentieth of its steps."""
        self._require(step_seconds * to_do, MARGIN * step_seconds * steps * FOLDS / (FOLDS - 1), last)

    def _require_time_after_start(self, candidate: Variant, last: bool) -> None:
        """The same at a tenth of the steps before its first one: a row takes as long in a pass as in them."""
        step, total = self.start.step_seconds, self.start.total
        part, whole = (
            step / PAIRS_IN_A_STEP * rows * self._epochs(candidate, rows)
            for rows in (self.rows * (FOLDS - 1) // FOLDS, self.rows)
        )
        self._require(step * (total - self.start.read[-1][0]) + part, MARGIN * (step * total + whole), last)

    def _require(self, seconds: float, of_last: float, last: bool) -> None:
        """The first run must leave time for the model of all rows, and so must one whose kind that is expected to be."""
        first = last or not any(found["state"] == "done" for found in self.record["runs"].values())
        needed = seconds + (of_last if first else 0.0)
        left = max(self.clock.left() + (self.clock.reserve if first else 0.0), 0.0)
        if needed > left:
            what = "and then the model of all rows take" if first else "take"
            raise TrialPruned(f"its steps {what} {needed:.0f} s more, and {left:.0f} s are left")

    def _require_rank(self, candidate: Variant, run: RunDir, event: Evaluated, share: int) -> None:
        """Successive halving: of those that came to a rung the better half stays, with some slack for chance."""
        rung = next((k for k in RUNGS if abs(share - k) < RUNGS[0] / 2), None)
        metric = main_metric_of(run, event.metrics)
        value = event.metrics.get(metric)
        if rung is None or value is None:
            return
        rungs = self.record["rungs"]
        others = {name: score for name, score in rungs.get(str(rung), {}).items() if name != candidate.name}
        mine = larger_is_better(metric, value)
        self.note("rungs", {**rungs, str(rung): {**others, candidate.name: mine}})
        slack = 0.5 / math.sqrt(max(event.n, 1)) if metric != "loss" and 0 <= value <= 1 else 0.0
        better = sum(score > mine + slack for score in others.values())
        if better > len(others) / 2:
            raise TrialPruned(f"{metric} {value:.4f} after {share}% of its steps is behind {better} of {len(others)}")

    def _clear(self, run: RunDir, found: Outcome) -> None:
        made = (*run.checkpoints(), run.best, *([] if found.state == "done" else [run.model]))
        for path in filter(Path.is_dir, made):
            retire(path)
