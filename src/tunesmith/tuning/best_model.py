"""`--recipe best --time_budget 20m`: one model, the best that the time allows. docs/decisions/0602 has the division of the time.

Candidates are tried on the first fold and halved; the two best are trained on the other folds; an ensemble, a soup of weights, a
temperature and thresholds are fitted to the held-out rows; then one model is trained on all rows, in the run folder itself.
The test rows are read by that last run alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config.validate import read_duration
from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, dump_config, to_dict
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.events import Event, SafePoint
from tunesmith.pipeline.identity import NOT_COMPARED, choose_folder
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.train import INPUTS, finetune
from tunesmith.pipeline.watch import RunEnding, RunResult, Watch
from tunesmith.runs.folder import BEST_OPTIONS, BEST_RESULT, RunDir, require_own_folder
from tunesmith.runs.lock import RunLock
from tunesmith.runs.manifest import retire
from tunesmith.runs.writing import make_folder, write_file
from tunesmith.tuning.chosen import Chosen, choose_model
from tunesmith.tuning.clock import Clock, TimeUp
from tunesmith.tuning.outcomes import MARGIN, Outcome, shorten_run
from tunesmith.tuning.tries import Tries
from tunesmith.tuning.variants import Variant, variations

MOST_MEMBERS = 3
"""Candidates that are trained on all folds."""
PAGES_SECONDS = 4.0
"""For curves, report and card."""


@dataclass(frozen=True)
class BestRun:
    """The run of the deployed model, and what best.json says about the way to it."""

    result: RunResult
    table: dict[str, Any]


def run_best(config: RunConfig, watch: Watch, data: Mapping[str, Any] | None = None) -> BestRun:
    """Trains, or resumes, until one model is done; `data` has rows in memory by split. The same call resumes after a crash."""
    began = time.monotonic()
    tables = {"train": None, "validation": None, "test": None, **(data or {})}
    if config.recipe != "best" or config.time_budget is None:
        raise ConfigError("--recipe best needs a --time_budget", fix="Add --time_budget 20m, for example.")
    budget = read_duration(config.time_budget)
    names: list[str | None] = [name.strip() for name in (config.model_name_or_path or "").split(",") if name.strip()]
    names = names or [None]
    config, moved = _own_folder(config, in_memory=tables["train"] is not None)
    if moved is not None:
        watch.say(moved)
    run = RunDir(config.run_folder)
    one = replace(config, model_name_or_path=names[0])
    inputs = {name: getattr(one, name) for name in INPUTS}
    require_own_folder(run, inputs, cache=config.cache_dir)
    bundle = read_run_data(replace(one, validation_split_fraction=0.0), tables, watch.progress).bundle
    folds = not any(split.startswith("validation") for split in bundle.splits)
    make_folder(run.path)
    folder = run.path / BEST_OPTIONS.parent
    with RunLock(folder / ".lock"):
        _require_same_options(config, run.path / BEST_OPTIONS)
        clock = Clock(folder / "clock", budget - (time.monotonic() - began))
        work = Tries(one, tables, folder, clock, watch, len(bundle.splits["train"]), folds)
        best = Stages(work, config, names, watch, len(bundle.splits.get("test", ())))
        how = "with a third of them held out" if folds else "judged by the validation rows"
        known = f"; {len(work.record['runs'])} tries are finished already" if work.record["runs"] else ""
        watch.say(f"Best: {config.time_budget} for {work.rows:,} rows: tries {how}, then one model of all rows{known}.")
        with suppress(TimeUp):
            best.explore()
        return best.deploy(run, tables)


def _own_folder(config: RunConfig, *, in_memory: bool) -> tuple[RunConfig, str | None]:
    """An unfinished run of these options is resumed; else the folder is chosen as for any run."""
    file = config.run_folder / BEST_OPTIONS
    if file.is_file() and not RunDir(config.run_folder).model.is_dir():
        return replace(config, output_dir=str(config.run_folder)), None
    return choose_folder(config, in_memory=in_memory)


def _require_same_options(config: RunConfig, file: Path) -> None:
    """The options of the first start stand in the folder; the budget may be raised."""
    if not file.is_file():
        write_file(file, dump_config(config).encode())
        return
    known, asked = to_dict(load_config(file, need_data=False)), to_dict(config)
    free = {*NOT_COMPARED, "time_budget"}
    changed = [name for name, value in asked.items() if known[name] != value and name not in free]
    if changed:
        raise CheckpointError(
            f"holds an unfinished run that differs in {', '.join(changed)}",
            where=str(file.parent.parent),
            fix="Give the same options, or another --output_dir.",
        )


class Stages:
    """The stages, each within what is left of the time; `members` are the candidates that are trained on all folds."""

    def __init__(
        self, work: Tries, config: RunConfig, bases: Sequence[str | None], watch: Watch, test_rows: int
    ) -> None:
        self.work, self.config, self.watch, self.test_rows = work, config, watch, test_rows
        self.auto = Variant("auto", "as auto decides" if len(bases) == 1 else str(bases[0]))
        self.bases = [
            Variant(f"base-{n}", str(base), {"model_name_or_path": base}) for n, base in enumerate(bases[1:], 2)
        ]
        self.tried: list[Variant] = []
        self.members: list[Variant] = []

    def explore(self) -> None:
        """Tries candidates on the first fold, then trains the best on the others; TimeUp ends it at any point."""
        clock = self.work.clock
        clock.reserve = max(clock.left(), 0.0) / 2  # nothing is timed yet: half of the time is for a model of all rows
        if self._try(self.auto) is None:
            return
        self.members = [self.auto]
        clock.reserve = self.last_seconds(self.auto)
        for base in self.bases:
            self._try(base)
        lead = max(self._done(), key=lambda one: self._score(one))
        self.members = [lead]
        self.work.clock.reserve = self.last_seconds(lead)
        self.members = [replace(lead, settled=self.work.decided(lead))]
        for other in variations(self.members[0], self.work.decided(lead), self.work.config):
            if self._fits(other):
                self._try(other)
        rest = [one for one in self._done() if one.name != lead.name]
        rest.sort(key=lambda one: (one.expected, self._score(one)), reverse=True)
        for other in rest[: MOST_MEMBERS - 1]:
            self._join(other)

    def _try(self, candidate: Variant) -> Outcome | None:
        self.tried.append(candidate)
        found = self.work.train(candidate, self.work.folds[0], halve=not candidate.expected)
        return found if found.state == "done" else None

    def _done(self) -> list[Variant]:
        return [one for one in self.tried if self.work.done_folds(one)]

    def _first(self, candidate: Variant) -> Outcome:
        found = self.work.outcome(candidate, self.work.folds[0])
        same = self.members[0] if self.members else self.auto
        found = found or self.work.outcome(same, self.work.folds[0])
        assert found is not None
        return found

    def _score(self, candidate: Variant) -> float:
        score = self._first(candidate).score
        return float("-inf") if score is None else score

    def seconds(self, candidate: Variant, *, all_rows: bool = False) -> float:
        """What one run of a candidate will take."""
        return self.work.forecast(candidate, self._first(candidate), all_rows=all_rows)

    def last_seconds(self, candidate: Variant) -> float:
        """What the model of all rows needs, with its scores and pages."""
        return MARGIN * self.seconds(candidate, all_rows=True) + self.finish_seconds(candidate)

    def finish_seconds(self, candidate: Variant) -> float:
        """From the last step of the last model to its files and pages."""
        found = self._first(candidate)
        pages = PAGES_SECONDS if self.watch.pages else 0.0
        return pages + self.test_rows * found.row_seconds / 2 + found.other_seconds / 2

    def _fits(self, other: Variant) -> bool:
        """Whether a further candidate leaves time for what the two best need: the first for its last model, others for folds."""
        lead, clock = self.members[0], self.work.clock
        cost = self.seconds(other)
        more = max(self.last_seconds(other) - clock.reserve, 0.0)  # one of the two is the last model
        folds = (len(self.work.folds) - 1) * (cost + self.seconds(lead))
        first = len(self._done()) == 1
        known = self.work.outcome(other, self.work.folds[0]) is not None
        return known or clock.left() >= cost + more + (0.0 if first else folds)

    def _join(self, other: Variant) -> None:
        """Makes it a member and trains all members on the folds that are left; a third only with time for all its folds."""
        clock, first = self.work.clock, len(self.members) == 1
        more = (len(self.work.folds) - len(self.work.done_folds(other))) * self.seconds(other)
        if first or clock.left() >= more:
            self.members.append(other)
            clock.reserve = max(map(self.last_seconds, self.members))
            self._train_folds(self.members)

    def _train_folds(self, members: Sequence[Variant]) -> None:
        """All members on the next fold, as long as there is time for all: they are compared by the same rows."""
        for fold in self.work.folds[1:]:
            here = [one for one in members if self.work.outcome(one, fold) is None]
            if self.work.clock.left() < sum(map(self.seconds, here)):
                break
            for one in here:
                self.work.train(one, fold)

    def deploy(self, run: RunDir, data: Mapping[str, Any]) -> BestRun:
        """Trains the last model in the run folder, with what the held-out rows say, and writes best.json."""
        clock = self.work.clock
        clock.reserve = 0.0
        if clock.left() <= 0 and not run.checkpoints():
            raise ConfigError(
                f"--time_budget {self.config.time_budget} is over before a model is trained",
                fix="The same command with a larger one resumes.",
            )
        self.work.note("deploying", True)
        chosen = None
        if self.members:
            clock.reserve = max(map(self.last_seconds, self.members))
            chosen = choose_model(self.work, self.members, self.seconds)
            lead = chosen.single
            config = self.work.config_for(lead, run.path, None, all_rows=True)
            clock.reserve = self.finish_seconds(lead)
        else:
            clock.reserve = PAGES_SECONDS
            timed = self.work.outcome(self.auto, self.work.folds[0]) or Outcome("stopped", **self.work.start.facts())
            config = shorten_run(self.work.config, timed, clock.left(), self.work.rows)
        lines = (
            chosen.lines()
            if chosen
            else (f"best: {self.config.time_budget} are enough for auto alone{_part_of(config)}",)
        )
        for line in lines:
            self.watch.say(f"Best: {line.removeprefix('best: ')}.")
        ending = (
            RunEnding(self._make_enough(), _nothing, lines=lines)
            if chosen is None
            else chosen.ending(self._make_enough())
        )
        kept = ("time_budget", "recipe", "run_name", "save_strategy", "save_steps", "report_to", "train_sample_size")
        config = replace(config, output_dir=str(run.path), **{name: getattr(self.config, name) for name in kept})
        rows = {f"{split}_data": table for split, table in data.items()}
        result = finetune(config, watch=self.watch, ending=ending, **rows)
        table = self._table(chosen, result)
        write_file(run.path / BEST_RESULT, json.dumps(table, indent=1).encode())
        for model in (*self.work.folder.glob("*/model"), *self.work.folder.glob("soup-*")):
            retire(model)  # one model is kept on disk; scores, journals and predictions of all
        return BestRun(result, table)

    def _make_enough(self) -> Callable[[Event], bool]:
        clock = self.work.clock

        def enough(event: Event) -> bool:
            return isinstance(event, SafePoint) and clock.left() <= 0

        return enough

    def _table(self, chosen: Chosen | None, result: RunResult) -> dict[str, Any]:
        runs = self.work.record["runs"]
        tried = [
            {
                "name": one.name,
                "what": one.said,
                "runs": {
                    path.name: runs[path.name]
                    for path in (
                        *(self.work.path(one, fold) for fold in self.work.folds),
                        self.work.path(one, None, all_rows=True),
                    )
                    if path.name in runs
                },
            }
            for one in self.tried
        ]
        return {
            "time_budget": self.config.time_budget,
            "seconds": round(self.work.clock.spent(), 1),
            "tried": tried,
            **(
                chosen.to_json()
                if chosen is not None
                else {"deployed": "auto", "why": "the time is enough for auto alone"}
            ),
            "steps": result.steps,
            "test": {name: score.to_json() for name, score in result.scores.get("test", {}).items()},
        }


def _part_of(config: RunConfig) -> str:
    """What of it, where that is less than `auto` would take."""
    if config.pair_start is None or config.num_train_epochs is None:
        return ""
    return f", with {config.pair_start} steps of its pair start and {config.num_train_epochs:g} passes over the rows"


def _nothing(model: Any) -> None:
    """Leaves a model as it is."""
