"""`--recipe best --time_budget 20m`: the best model that can be trained within a time budget.

1. The `auto` recipe is trained on the first of three folds. Its speed shows what else fits into the budget.
2. Variants are trained on the same fold: adversarial training, a longer pair warm-up, another pooling.
3. The best variants are trained on the other folds. A paired test on the held-out examples chooses one.
4. A temperature and thresholds are fitted to the held-out examples. The chosen variant is trained on all examples, in the run
   folder itself. Only this last run reads the test examples.

Every trial is an ordinary run below `tries/`, and `tries/record.json` says how it ended: the same command resumes after a crash.
Given validation examples replace the folds. docs/decisions/0013-recipe.md has the reasons.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.config.load import load_config, read_duration
from tunesmith.config.options import RunConfig, dump_config
from tunesmith.errors import CheckpointError, ConfigError, NumericsError
from tunesmith.events import Event, RunEnded, SafePoint, StepDone
from tunesmith.files import hash_file, make_folder, write_file
from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import Task
from tunesmith.metrics.calibration import (
    MovedThresholds,
    Temperature,
    fit_temperature,
    fit_thresholds,
    log_loss_of,
)
from tunesmith.metrics.paired import PairedResult, compare_predictions
from tunesmith.metrics.table import Array, Score, greater_is_better, make_suite
from tunesmith.models.families import last_linear
from tunesmith.pipeline.folds import held_out_rows
from tunesmith.pipeline.inputs import RunData, choose_folder, read_run_data, require_usable
from tunesmith.pipeline.prepare import require_same_options
from tunesmith.pipeline.recipe import NAMES, epochs_for
from tunesmith.pipeline.results import RunResult
from tunesmith.pipeline.train import RunEnding, RunObserver, finetune
from tunesmith.report.build import diagnose_run
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import BEST_OPTIONS, BEST_RESULT, RunDir, RunLock, delete_folder, end_of, read_metrics
from tunesmith.tuning.trials import (
    Clock,
    TimeUp,
    TrialPruned,
    damaged,
    inputs_identity,
    larger_is_better,
    read_record,
    require_same_inputs,
    trial_score,
)

log = logging.getLogger(__name__)

FOLDS = 3
"""More folds cost more time for the same number of held-out examples."""
FINALISTS = 3
"""Variants that are trained on all folds."""
ADVERSARIAL = 0.02
"""Strength of adversarial training: the best value on the development tasks (docs/research/recipes.md)."""
LONG_PAIR_START = 600
"""Steps of the longer pair warm-up: with 500 examples they gained twice as much as the 200 of `auto`."""
MARGIN = 1.15
"""How much longer than forecast a run may take."""
PAGES_SECONDS = 4.0
"""For curves, report and model card."""
SAVE_STEPS = 500
"""A shorter trial starts again after a crash: its checkpoints would cost more."""
WARM_READS, TIMED_READS = 3, 5
"""Readings of the step time that are ignored, because kernels are compiled in them, and that are used."""
SPLIT = "out_of_fold"
"""The name of the held-out scores in metrics.json."""
TINY = 1e-12
LAST_WEIGHTS = {"load_best_model_at_end": False, "early_stopping_patience": None, "eval_strategy": "no"}
"""Options of every run: held-out examples choose between runs, not within one."""


@dataclass(frozen=True)
class BestRun:
    """The run of the final model, and the content of best.json."""

    result: RunResult
    table: dict[str, Any]


def run_best(config: RunConfig, observer: RunObserver) -> BestRun:
    """Train, or resume, until the final model is done."""
    began = time.monotonic()
    assert config.time_budget is not None  # find_problems requires it for --recipe best
    budget, folder = read_duration(config.time_budget), config.run_folder
    is_unfinished = (folder / BEST_OPTIONS).is_file() and not (folder / BEST_RESULT).is_file()
    if not is_unfinished:  # otherwise it is continued, even if its model is finished
        config = choose_folder(config, observer.log)
    run = require_usable(config)
    search = BestSearch(replace(config, output_dir=str(run.path)), observer)
    options = run.path / BEST_OPTIONS
    make_folder(run.path)
    with RunLock(options.with_name(".lock")):
        require_same_options(config, options)
        write_file(options, dump_config(config).encode())
        search.open_record(Clock(options.with_name("clock.json"), budget - (time.monotonic() - began)))
        try:
            with suppress(TimeUp):
                search.explore()
            choice = search.choose()
            return search.train_final(run, choice)
        finally:
            search.clock.save()


@dataclass(frozen=True)
class Variant:
    """A way to train. `options` override the config.

    `settled` are the choices of `auto` on the first fold, which are kept on the other folds. With all examples it decides again.
    `expected`: known to be better on other tasks, so it is chosen unless the held-out examples show that it is worse.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settled: Mapping[str, Any] = field(default_factory=dict)
    expected: bool = False

    @property
    def description(self) -> str:
        """Return the options, or "the auto recipe"."""
        return ", ".join(f"{name} {value}" for name, value in self.options.items()) or "the auto recipe"


def variations(lead: Variant, config: RunConfig) -> Iterator[Variant]:
    """Yield variants of the options that are not set, the most promising first."""
    push = {} if config.adversarial else {"adversarial": ADVERSARIAL}
    longer: dict[str, Any] = {}
    if config.pair_start is None and lead.settled["pair_start"]:
        longer = {"pair_start": max(LONG_PAIR_START, 2 * lead.settled["pair_start"])}
    tried = [{**longer, **push}, longer, push] if longer and push else [longer or push]
    if config.pooling is None:
        tried.append({"pooling": "first" if lead.settled["pooling"] == "mean" else "mean"})
    for number, options in enumerate(tried, 1):
        if options:
            yield Variant(f"{lead.name}-{number}", options, lead.settled, expected="pooling" not in options)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: "done", "stopped" or "failed"."""

    state: str
    metric: str | None = None
    score: float | None = None
    """Larger is better."""
    why: str | None = None
    seconds: float = 0.0
    steps: int = 0
    predictions: str | None = None
    """The hash of the file with the held-out predictions."""

    def __post_init__(self) -> None:
        numbers = (self.seconds, self.score if self.state == "done" else 0.0)
        if self.state not in ("done", "stopped", "failed") or not all(isinstance(n, (int, float)) for n in numbers):
            raise TypeError("a state or a number is missing")


class BestSearch:
    """Trains variants on folds, chooses one, and trains it on all examples."""

    def __init__(self, config: RunConfig, observer: RunObserver) -> None:
        self.config, self.observer = config, observer
        self.folder = config.run_folder / BEST_OPTIONS.parent
        data = self._read_data()
        self.inputs, splits = inputs_identity(config, data), data.bundle.splits
        self.rows, self.test_rows = len(splits["train"]), len(splits.get("test", ()))
        self.has_pairs = len(data.bundle.columns.text) == 2
        held_out = any(split.startswith("validation") for split in splits)
        self.folds: tuple[int | None, ...] = (None,) if held_out else tuple(range(1, FOLDS + 1))
        self.batch = config.decided.per_device_train_batch_size * config.gradient_accumulation_steps
        self.tried: list[Variant] = []
        self.finalists: list[Variant] = []

    def _read_data(self) -> RunData:
        return read_run_data(replace(self.config, validation_split_fraction=0.0), {}, self.observer.progress)

    def _require_same_inputs(self) -> None:
        require_same_inputs(self.inputs, inputs_identity(self.config, self._read_data()), self.folder.parent)

    # The record of finished trials

    def open_record(self, clock: Clock) -> None:
        """Read how earlier trials ended. The folder must be locked."""
        self.clock, self._file = clock, self.folder / "record.json"
        self.record: dict[str, Any] = {"inputs": self.inputs, "runs": {}}
        if not self._file.is_file():
            self.note()  # with the inputs, before the first trial reads them
        self.record = read_record(self._file)
        inputs, runs = self.record.get("inputs"), self.record.get("runs")
        if not isinstance(inputs, dict) or not isinstance(runs, dict):
            raise damaged(self._file, "does not describe the trials")
        require_same_inputs(inputs, self.inputs, self.folder.parent)
        for name, found in list(runs.items()):
            try:
                outcome = Outcome(**found)
            except TypeError as error:
                raise damaged(self._file, f"does not describe the trial {name} ({error})") from None
            file = RunDir(self.folder / name).predictions_file
            if outcome.state != "done":
                continue
            if not file.parent.is_dir():
                del runs[name]  # to be trained again
            elif not file.is_file() or hash_file(file) != outcome.predictions:
                fix = f"Remove the folder {name} and run the same command again to repeat the trial."
                raise CheckpointError("is missing or was modified", where=str(file), fix=fix)
        known = f" {len(runs)} trials are finished already." if runs else ""
        how = "the validation examples" if self.folds == (None,) else f"{FOLDS} folds"
        self.observer.log(
            f"Best: {self.config.time_budget} for {self.rows:,} examples. Trials are compared on {how}, then one model is "
            f"trained on all examples. The first trial shows how many others there is time for.{known}"
        )

    def note(self) -> None:
        """Store the record."""
        write_file(self._file, json.dumps(self.record, indent=1).encode())

    def path(self, variant: Variant, fold: int | None) -> Path:
        """Return the run folder of a trial."""
        return self.folder / f"{variant.name}-{'held-out' if fold is None else f'fold-{fold}'}"

    def outcome(self, variant: Variant, fold: int | None) -> Outcome | None:
        """Return how a trial ended; None if it was not trained to its end."""
        found = self.record["runs"].get(self.path(variant, fold).name)
        return None if found is None else Outcome(**found)

    def done_folds(self, variant: Variant) -> list[int | None]:
        """Return the folds on which a variant was trained to its end."""
        return [k for k in self.folds if (found := self.outcome(variant, k)) is not None and found.state == "done"]

    # Trials

    def explore(self) -> None:
        """Train `auto` and variants on the first fold, then the best ones on the others. TimeUp ends it at any point."""
        clock, (first, *others) = self.clock, self.folds
        auto = Variant("auto")
        clock.reserve = max(clock.left(), 0.0) / 2  # half of the time is for the final model until the speed is known
        if self.trial(auto, first).state != "done":
            return
        chosen = load_config(RunDir(self.path(auto, first)).config_file, need_data=False)
        lead = replace(auto, settled={name: getattr(chosen, name) for name in NAMES if name != "num_train_epochs"})
        self.finalists = [lead]
        clock.reserve = self.final_seconds(lead)
        for variant in variations(lead, self.config):
            cost = self.seconds(variant) + max(self.final_seconds(variant) - clock.reserve, 0.0)
            if len(self.tried) > 1:  # the first variant may use the time of the other folds
                cost += len(others) * (self.seconds(variant) + self.seconds(lead))
            if self.outcome(variant, first) is not None or clock.left() >= cost:
                self.trial(variant, first)
        rest = [one for one in self.tried if one.name != lead.name and first in self.done_folds(one)]
        rest.sort(key=lambda one: (one.expected, self._first_outcome(one).score or 0.0), reverse=True)
        self.finalists = [lead, *rest[: FINALISTS - 1]]
        while len(self.finalists) > 2 and clock.left() < len(others) * sum(map(self.seconds, self.finalists)):
            self.finalists.pop()
        clock.reserve = max(map(self.final_seconds, self.finalists))
        for fold in others if len(self.finalists) > 1 else ():
            missing = [one for one in self.finalists if self.outcome(one, fold) is None]
            if clock.left() < sum(map(self.seconds, missing)):
                break
            for one in missing:
                self.trial(one, fold)

    def trial(self, variant: Variant, fold: int | None) -> Outcome:
        """Train a variant on a fold unless that is done; TimeUp if the time is up meanwhile."""
        if all(one.name != variant.name for one in self.tried):
            self.tried.append(variant)
        known = self.outcome(variant, fold)
        if known is not None:
            return known
        if self.record.get("deploying"):
            raise TimeUp  # the final model is being trained: the choice is made
        self._require_same_inputs()
        began, run = time.monotonic(), RunDir(self.path(variant, fold))
        try:
            if end_of(run) is None:
                observer = self._watch(variant, fold)
                finetune(self._trial_config(variant, run, fold), observer=observer, use_test=False)
            metric, score = trial_score(run)
            steps = [event for event in read_journal(run.journal_file) if isinstance(event, StepDone)]
            found = Outcome(
                "done",
                metric,
                score,
                seconds=sum(step.seconds for step in steps),  # if it ended in an earlier process, all that is known
                steps=len(steps),
                predictions=hash_file(run.predictions_file),
            )
        except TrialPruned as error:
            found = Outcome("stopped", why=error.problem)
        except (NumericsError, ConfigError) as error:
            if variant.name == "auto":
                raise  # the options of the user are wrong: no variant can work
            found = Outcome("failed", why=error.line())
        found = replace(found, seconds=max(found.seconds, time.monotonic() - began))
        self.record["runs"][run.name] = asdict(found)
        self.note()
        for unused in (*run.checkpoints(), run.model):
            if unused.is_dir():
                delete_folder(unused)
        shown = found.why if found.metric is None else f"{found.metric} {abs(found.score or 0.0):.4f}"
        self.observer.log(f"Trial {run.name}: {shown} ({variant.description}; {found.seconds:.0f} s).")
        return found

    def _trial_config(self, variant: Variant, run: RunDir, fold: int | None) -> RunConfig:
        options: dict[str, Any] = {
            "recipe": "auto",
            "time_budget": None,
            "output_dir": str(run.path),
            "run_name": f"{self.config.name}-{run.name}",
            "folds": None if fold is None else FOLDS,
            "fold": fold,
            "train_sample_size": 0,
            "save_strategy": "steps" if self._steps(fold) > SAVE_STEPS else "no",
            "save_steps": SAVE_STEPS,
            "report_to": ("none",),
        }
        return replace(self.config, **{**options, **variant.settled, **LAST_WEIGHTS, **variant.options})

    # Time

    def _steps(self, fold: int | None) -> float:
        """Return the number of steps without this fold; `auto` trains more epochs on fewer examples."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        rows = self.rows if fold is None else self.rows * (FOLDS - 1) // FOLDS
        return rows * (self.config.num_train_epochs or epochs_for(rows, self.batch)[0]) / self.batch

    @property
    def growth(self) -> float:
        """The steps of the final model per step of a trial."""
        return self._steps(None) / self._steps(self.folds[0])

    def _first_outcome(self, variant: Variant) -> Outcome:
        """Return how the variant ended on the first fold, or `auto` if it was not trained yet."""
        found = self.outcome(variant, self.folds[0]) or self.outcome(self.tried[0], self.folds[0])
        assert found is not None
        return found

    def seconds(self, variant: Variant) -> float:
        """Return the forecast of a trial. Adversarial steps take up to twice as long, which `_watch` notices."""
        return self._first_outcome(variant).seconds

    def final_seconds(self, variant: Variant) -> float:
        """Return the forecast of the final model with its scores and pages."""
        return MARGIN * self.growth * self.seconds(variant) + self.closing_seconds(variant)

    def closing_seconds(self, variant: Variant) -> float:
        """Return the forecast from the last step of the final model to its report."""
        pages = PAGES_SECONDS if self.observer.pages else 0.0
        per_example = self.seconds(variant) / (self._steps(self.folds[0]) * self.batch)
        return pages + self.test_rows * per_example / 2  # a prediction takes less than half of a step

    def _watch(self, variant: Variant, fold: int | None) -> RunObserver:
        """Return hooks that stop a trial that would not finish in time, as soon as its speed is known."""
        steps, times, judged = 0, list[float](), False
        is_first = variant.name == "auto" and fold == self.folds[0]
        # The first trial, and the first one of a variant that is likely to be chosen, must leave time for the final model.
        before_final = is_first or (variant.expected and fold == self.folds[0])

        def plan(num_steps: int, per_epoch: float) -> None:
            nonlocal steps
            steps = num_steps

        def listen(event: Event) -> None:
            nonlocal judged
            if not isinstance(event, StepDone) or judged:
                return
            if event.seconds not in times[-1:]:  # on a GPU one reading covers several steps
                times.append(event.seconds)
            if len(times) < WARM_READS + TIMED_READS or event.step < steps // 20:
                return
            judged = True
            step = statistics.median(times[WARM_READS:])
            rest = step * (steps - event.step)
            final = MARGIN * self.growth * step * steps if before_final else 0.0
            left = max(self.clock.left() + (self.clock.reserve if before_final else 0.0), 0.0)
            if is_first:
                self._announce(step * steps, left, rest + final)
            if rest + final > left:
                what = "this trial and the final model need" if before_final else "this trial needs"
                raise TrialPruned(f"{what} {rest + final:.0f} more seconds, but only {left:.0f} s are left")

        return RunObserver(progress=self.clock.beat, plan=plan, listeners=[self.clock.beat, listen], pages=False)

    def _announce(self, trial: float, left: float, needed: float) -> None:
        """Report how many trials there is time for, as soon as the speed of the first one is known; all in seconds."""
        text = f"Best: a trial takes about {trial:.0f} s; there is time for about {(left - needed) / trial:.0f} more."
        if left - needed < trial:
            budget = self.clock.spent() + needed + 2 * trial
            text = (
                f"Best: a trial takes about {trial:.0f} s, so there is no time for variants: the auto recipe is used. "
                f"Set --time_budget {budget / 60:.0f}m or more to compare variants."
            )
        self.observer.log(text)

    # The final model

    def choose(self) -> Choice | None:
        """Choose a finalist by the held-out examples that all finalists have predicted; None if there was no time."""
        if not self.finalists:
            return None
        lead = self.done_folds(self.finalists[0])
        finalists = [one for one in self.finalists if len(self.done_folds(one)) >= min(2, len(lead))]
        folds = [fold for fold in lead if all(fold in self.done_folds(one) for one in finalists)]
        held = {one.name: read_held_out([self.path(one, fold) for fold in folds]) for one in finalists}
        metric, config = self._first_outcome(finalists[0]).metric or "loss", self.config
        chosen = pick(finalists, held, metric)
        rows = held[chosen.name]
        temperature = fit_temperature(rows.logits, rows.gold, rows.task)
        calibrated = rows if temperature is None else replace(rows, logits=rows.logits / temperature.value)
        moved = None
        if rows.task is Task.MULTILABEL or metric.startswith("f1") or config.move_thresholds:
            moved = fit_thresholds(calibrated.probabilities, rows.gold, rows.task)
        decisions = None if moved is None else moved.decisions
        positive = rows.names[1] if rows.task is Task.BINARY and len(rows.names) == 2 else None
        names, glue = config.metric_name, config.task_name
        suite = make_suite(rows.task, names=names, glue_task=glue, scores="probabilities", positive_name=positive)
        return Choice(
            metric=metric,
            variant=chosen,
            held_out={n: suite.compute_with_intervals(part.probabilities, part.gold) for n, part in held.items()},
            final=suite.compute_with_intervals(calibrated.probabilities, rows.gold, decisions=decisions),
            gain=None if chosen.name == "auto" else rows.compare(held["auto"], metric),
            temperature=temperature,
            thresholds=moved,
            more_rows=1.0 if self.folds == (None,) else FOLDS / (FOLDS - 1),
        )

    def train_final(self, run: RunDir, choice: Choice | None) -> BestRun:
        """Train the chosen variant on all examples in the run folder, and write best.json."""
        clock, complete = self.clock, end_of(run) is not None
        clock.reserve = 0.0
        if clock.left() <= 0 and not run.checkpoints() and not complete:
            raise ConfigError(
                f"--time_budget {self.config.time_budget} is over before a model is trained",
                fix="Run the same command with a larger budget to resume.",
            )
        self._require_same_inputs()
        self.record["deploying"] = True  # after a crash, the choice is not made again
        self.note()
        config = self.config
        if choice is not None:
            clock.reserve = self.closing_seconds(choice.variant)
            options = {**LAST_WEIGHTS, **choice.variant.options}
            if self.folds != (None,):
                options["validation_split_fraction"] = 0.0
            config, ending = replace(config, **options), choice.ending()
        else:
            clock.reserve = PAGES_SECONDS
            skips = self.has_pairs and config.pair_start is None
            config = replace(config, pair_start=0) if skips else config
            part = ", without a pair warm-up" if skips else ""
            ending = RunEnding(lines=(f"best: {config.time_budget} is enough only for auto{part}",))
        for line in ending.lines:
            self.observer.log(f"Best: {line.removeprefix('best: ')}.")
        ending = replace(ending, enough=lambda event: isinstance(event, SafePoint) and clock.left() <= 0)
        if complete:  # killed between the report and best.json
            result = _read_result(run)
        else:
            result = finetune(config, observer=self.observer, ending=ending)
        table = self._table(choice, result)
        write_file(run.path / BEST_RESULT, json.dumps(table, indent=1).encode())
        return BestRun(result, table)

    def _table(self, choice: Choice | None, result: RunResult) -> dict[str, Any]:
        runs = self.record["runs"]
        paths = {one.name: [self.path(one, fold).name for fold in self.folds] for one in self.tried}
        return {
            "time_budget": self.config.time_budget,
            "seconds": round(self.clock.spent(), 1),
            "tried": [
                {
                    "name": one.name,
                    "what": one.description,
                    "runs": {name: runs[name] for name in paths[one.name] if name in runs},
                }
                for one in self.tried
            ],
            **(choice.to_json() if choice else {"deployed": "auto", "why": "the time is enough only for auto"}),
            "steps": result.steps,
            "test": {name: score.to_json() for name, score in result.scores.get("test", {}).items()},
        }


def _read_result(run: RunDir) -> RunResult:
    """Return the result of a run that is finished, from its files."""
    scores = {
        split: {name: Score.from_json(score) for name, score in found.items()}
        for split, found in read_metrics(run.metrics_file).items()
        if split != "baselines"
    }
    end = next(event for event in reversed(read_journal(run.journal_file)) if isinstance(event, RunEnded))
    return RunResult(run, scores, end.step, None, tuple(f"{f.code}: {f.evidence}" for f in diagnose_run(run)))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that a model was not trained on: its logits (values in regression) and their labels."""

    task: Task
    logits: Array
    gold: Array
    names: tuple[str, ...] = ()

    @property
    def probabilities(self) -> Array:
        """Return the probability of each label; the value itself in regression."""
        return probabilities_of(self.logits, self.task)

    def loss(self) -> float:
        """Return the mean squared error in regression, else the log loss."""
        if self.task is Task.REGRESSION:
            return float(np.mean((self.logits - self.gold) ** 2))
        return log_loss_of(self.logits, self.gold)

    def score(self, metric: str) -> float:
        """Return the score; larger is better."""
        if metric == "loss":
            return -self.loss()
        suite = make_suite(self.task, names=(metric,), scores="probabilities")
        value = suite.compute(self.probabilities, self.gold)[metric]
        return -np.inf if value is None else larger_is_better(metric, value)

    def compare(self, baseline: HeldOut, metric: str) -> PairedResult:
        """Compare with a baseline by a paired test."""
        name = metric if metric != "loss" else make_suite(self.task).metric_for_best_model
        both = baseline.probabilities, self.probabilities
        return compare_predictions(*both, self.gold, task=self.task, metric=name, scores="probabilities")

    def is_worse(self, baseline: HeldOut, metric: str) -> bool:
        """Return whether this is worse than the baseline by the paired test or, if not significant, by score and loss."""
        tested, has_larger_loss = self.compare(baseline, metric), self.loss() > baseline.loss()
        if tested.difference is None or tested.p_value is None:
            return has_larger_loss
        behind = tested.difference < 0 if greater_is_better(tested.metric) else tested.difference > 0
        return behind and (tested.p_value <= 0.05 or has_larger_loss)


def read_held_out(folders: Sequence[Path]) -> HeldOut:
    """Return the held-out examples of trials on different folds, one after the other."""
    parts = []
    for folder in folders:
        rows = held_out_rows(folder)
        assert rows is not None  # a trial without them has no score
        if rows.task is Task.REGRESSION or rows.probabilities is None:
            logits = rows.predicted.astype(np.float64)
        else:
            logits = np.log(np.clip(rows.probabilities, TINY, 1.0))
            if rows.task is Task.MULTILABEL:
                logits = logits - np.log(np.clip(1 - rows.probabilities, TINY, 1.0))
        parts.append((rows, logits))
    first = parts[0][0]
    gold = np.concatenate([rows.labels for rows, _ in parts])
    return HeldOut(first.task, np.concatenate([logits for _, logits in parts]), gold, first.names)


def pick(finalists: Sequence[Variant], held: Mapping[str, HeldOut], metric: str) -> Variant:
    """Return the variant with the best score, or one that is expected to be better and not shown to be worse."""
    best = max(finalists, key=lambda one: (held[one.name].score(metric), -held[one.name].loss()))
    better = (one for one in finalists if one.expected and not held[one.name].is_worse(held[best.name], metric))
    return next(better, best)


@dataclass(frozen=True, eq=False)
class Choice:
    """The variant that is trained last, and the results on the held-out examples."""

    metric: str
    variant: Variant
    held_out: dict[str, dict[str, Score]]
    """Scores of each finalist."""
    final: dict[str, Score]
    """Scores of the chosen variant after temperature and thresholds."""
    gain: PairedResult | None
    """The chosen variant compared with `auto`."""
    temperature: Temperature | None
    thresholds: MovedThresholds | None
    more_rows: float
    """Training examples of the final model per training example of a trial."""

    @property
    def applied_temperature(self) -> float:
        """The divisor of the final model's logits. A model trained on more examples is rightly more confident: the fitted
        temperature is divided by the square root of their ratio (docs/research/recipes.md)."""
        return 1.0 if self.temperature is None else self.temperature.value / self.more_rows**0.5

    def ending(self) -> RunEnding:
        """Return the end of the final run: the head is scaled by the temperature, thresholds are set, reasons are stored."""
        moved = None if self.thresholds is None else self.thresholds.thresholds
        scale = self.applied_temperature
        change = None if self.temperature is None else partial(scale_head, temperature=scale)
        return RunEnding(change=change, thresholds=moved, lines=tuple(self._lines()), scores={SPLIT: self.final})

    def _lines(self) -> Iterator[str]:
        """Yield the choice and its reasons."""
        score = self.final[self.metric].text() if self.metric in self.final else ""
        yield f"best: {self.variant.name} ({self.variant.description}), held-out {self.metric} {score}"
        if self.gain is not None:
            gap, tested = "not defined", self.gain
            if tested.difference is not None:
                gap = f"{tested.difference:+.4f} [{tested.low:+.3f}, {tested.high:+.3f}], p={tested.p_value:.2g}, n={tested.n:,}"
            kept = "; it is better on other tasks and not shown to be worse here" if self.variant.expected else ""
            yield f"best: compared with auto, {tested.metric} {gap}{kept}"
        if self.temperature is not None:
            more = f"; {self.applied_temperature:.3g} for the final model" if self.more_rows > 1 else ""
            yield f"best: {self.temperature.line()}{more}"
        if self.thresholds is not None:
            yield f"best: {self.thresholds.line('held-out').removesuffix('.')}"

    def to_json(self) -> dict[str, Any]:
        """Return the entries of best.json."""
        moved = self.thresholds
        return {
            "metric": self.metric,
            "deployed": f"{self.variant.name} ({self.variant.description})",
            "held_out": {k: {n: s.to_json() for n, s in v.items()} for k, v in self.held_out.items()},
            "gain_over_auto": None if self.gain is None else asdict(self.gain),
            "temperature": None if self.temperature is None else asdict(self.temperature),
            "applied_temperature": self.applied_temperature,
            "thresholds": None if moved is None else {"kept": moved.thresholds, "line": moved.line("held-out")},
        }


def scale_head(model: torch.nn.Module, temperature: float) -> None:
    """Divide the logits by the temperature, in the weights, so that every tool gets calibrated probabilities."""
    try:
        layer = last_linear(model)
    except ConfigError as error:
        log.warning("the temperature is not applied: %s", error.line())
        return
    with torch.no_grad():
        layer.weight.div_(temperature)
        if layer.bias is not None:
            layer.bias.div_(temperature)
