"""A training run from config to report, in order: `tunesmith train`, `finetune(df)` and every trial of a search run this.

    config   = complete_config(...)     # the only place where options are completed and checked
    run      = choose_folder(config)    # refuses a finished run
    data     = read_run_data(config)    # examples, columns, task, labels, splits; audited
    runtime  = start_runtime(config)    # device, precision and ranks, decided once
    prepared = prepare(...)             # tokens, model, recipe, speedups, identity, plan (prepare.py)
    for event in writer.train(...)      # the steps; checkpoints and the event log are written meanwhile
    result   = finish_run(...)          # scores, predictions, model folder, report (results.py)

Nothing here imports torch at module level: errors in the options, the data or the name of the model are reported within a
second or two, before the heavy libraries load and before a run folder is made.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, dump_config, to_dict
from tunesmith.config.validate import DATA_SOURCES
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.events import Event, RunEnded, RunStarted, StepDone
from tunesmith.files import write_file
from tunesmith.pipeline.inputs import read_run_data, refuse_what_is_not_built
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, RunLock, describe_environment, end_of, is_run, read_launch, require_own_folder

if TYPE_CHECKING:
    from tunesmith.metrics.table import Score
    from tunesmith.pipeline.prepare import Prepared
    from tunesmith.pipeline.results import RunResult
    from tunesmith.training.run_writer import RunWriter

INPUTS = (
    *("model_name_or_path", "tokenizer_name", "dataset_name"),
    *("train_file", "validation_file", "test_file", "labels_file"),
)
"""Options that may name a folder or file that the run reads."""


Log = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]
"""Called with (what, done, total), in examples, or in bytes while a file is read."""


PAIR_STAGE = "pair warm-up"
"""Name of the pair warm-up in progress bars."""


@dataclass
class RunObserver:
    """Receives the messages and events of a run. `plan` is called with (total steps, steps per epoch) before the first event.

    Without `pages`, no curves and no report are drawn, as in a search over many runs.
    """

    log: Log = lambda text: None
    progress: ShowProgress = lambda what, done, total: None
    plan: Callable[[int, float], None] = lambda num_steps, steps_per_epoch: None
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    pages: bool = True
    start_steps: int | None = None
    """Maximum number of pair warm-up steps: `tunesmith plan` times a few of them."""


@dataclass(frozen=True)
class RunEnding:
    """Changes to the end of a run: `enough` stops training after an event, and `change` modifies the model before it is scored.

    `thresholds`, `lines` (after those of the recipe) and `scores` (after those of the splits) are stored with the run.
    """

    enough: Callable[[Event], bool] = lambda event: False
    change: Callable[[Any], None] = lambda model: None
    thresholds: tuple[float, ...] | None = None
    lines: tuple[str, ...] = ()
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)


def finetune(
    config: RunConfig | None = None,
    *,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    observer: RunObserver | None = None,
    use_test: bool = True,
    ending: RunEnding | None = None,
    **options: Any,
) -> RunResult:
    """Train, evaluate and export one run; resume it if its folder contains an unfinished one.

    Data comes from the files or names in the config, or as a Dataset, DatasetDict, DataFrame or list of dicts. Without
    `use_test`, test examples are neither predicted nor scored.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    in_memory = train_data is not None
    config = complete_config(config, options, in_memory=in_memory, one_of_many=ending is not None)
    config, note = choose_folder(config, in_memory=in_memory)
    run, launch = RunDir(config.run_folder), read_launch()
    is_main = launch.rank == 0
    observer = observer if observer is not None and is_main else RunObserver()
    if is_main:
        if note is not None:
            observer.log(note)
        _require_folder(config, run)
    read = partial(read_run_data, config, data, observer.progress, use_test=use_test)
    # Several ranks read one after the other: the first builds the table that the others find.
    found = read() if launch.world == 1 else None
    with RunLock(run.lock_file) if is_main else nullcontext():
        from tunesmith.pipeline.prepare import prepare, start_runtime
        from tunesmith.training.distributed import watch_ranks

        runtime = start_runtime(config)
        with watch_ranks(runtime):
            prepared = prepare(config, runtime, lambda: found or read(), observer)
            return train_run(run, prepared, observer, ending or RunEnding())


def train_run(run: RunDir, prepared: Prepared, observer: RunObserver, ending: RunEnding) -> RunResult:
    """Train in this folder, then evaluate, export and report; resume an unfinished run that is there."""
    from tunesmith.pipeline.results import Evaluation, finish_run

    writer = _make_writer(run, prepared, observer)
    evaluation = Evaluation(prepared, observer, writer) if "validation" in prepared.tokenized else None
    observer.plan(prepared.plan.num_steps, float(prepared.plan.epoch_ends[0]))
    with writer.recording():
        _begin(run, prepared, writer)
        for event in writer.train(prepared.batches, evaluation):
            if ending.enough(event):
                break
        writer.stop.raise_immediately()
        known = evaluation.predictions if evaluation is not None and ending.change is RunEnding.change else {}
        return finish_run(prepared, observer, writer, ending, known)


def complete_config(
    config: RunConfig | None, options: dict[str, Any], *, in_memory: bool, one_of_many: bool = False
) -> RunConfig:
    """Return the config updated with the options, checked like a command line.

    `in_memory`: the training data is passed as a table. `one_of_many`: the run is part of `--recipe best`.
    """
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if given or config is None:
        config = load_config(None, given, need_data=not in_memory, start=config)
    named = next((name for name in DATA_SOURCES if getattr(config, name) is not None), None)
    if in_memory and named not in (None, "task_name"):
        raise ConfigError(f"both train_data and {named} are set", fix="Set one source of training data.")
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        raise ConfigError(
            "folds and seeds train several runs, and finetune trains one",
            fix="Call tunesmith.pipeline.folds.run_repeats(config, RunObserver()), or set one fold.",
        )
    refuse_what_is_not_built(config, one_of_many=one_of_many)
    return config


def _make_writer(run: RunDir, prepared: Prepared, observer: RunObserver) -> RunWriter:
    """Return the writer of event log and checkpoints; on rank 0 it passes events to the observer and to trackers."""
    from tunesmith.inference.model_folder import describe_model
    from tunesmith.training.run_writer import RunWriter

    config, plan, state = prepared.config, prepared.plan, prepared.state
    listeners: list[Callable[[Event], None]] = []
    if prepared.runtime.is_main:
        listeners = [*observer.listeners, _announce_plan(prepared, observer.log)]
        names = [name for name in config.report_to if name != "none"]
        if names:
            from tunesmith.pipeline.trackers import make_trackers

            listeners.append(make_trackers(names, config, plan, state.model))
    return RunWriter(
        run,
        state,
        prepared.identity,
        plan=plan,
        describe=describe_model(state.model, prepared.tokenizer, prepared.facts),
        keep_checkpoints=config.save_total_limit or 10**9,
        keep_best=plan.metric is not None and config.load_best_model_at_end is not False,
        allow_changed=config.allow_changed_data,
        listeners=listeners,
    )


WARM_STEPS, TIMED_STEPS = 3, 10
"""The first steps are slower and not timed."""
ANNOUNCED_STEPS = 40
"""Shorter runs get no forecast."""


def _announce_plan(prepared: Prepared, log: Log) -> Callable[[Event], None]:
    """Return a listener that reports once, after the first steps, how long the run will take."""
    timed: list[StepDone] = []
    plan, batches = prepared.plan, prepared.batches

    def on(event: Event) -> None:
        if not isinstance(event, StepDone) or plan.num_steps < ANNOUNCED_STEPS or len(timed) >= TIMED_STEPS:
            return
        if event.step > max(WARM_STEPS, plan.read_back_every):
            timed.append(event)
        if len(timed) < TIMED_STEPS:
            return
        tokens = float(batches.rows.lengths.sum()) / batches.steps_in_epoch(0) / batches.world
        seconds = sum(s.seconds for s in timed) / max(sum(s.tokens for s in timed), 1) * tokens * plan.num_steps
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
        took = took if seconds < 7200 else f"{seconds / 3600:.1f} h"
        weights = sum(p.numel() * p.element_size() for p in prepared.state.model.parameters())
        log(
            f"Plan: {plan.num_steps:,} steps take about {took}; peak memory so far {peak_bytes(prepared) / 1e6:,.0f} MB; "
            f"about {5 * weights / 1e6:,.0f} MB on disk while it trains."
        )

    return on


def peak_bytes(prepared: Prepared) -> int:
    """Return the peak memory so far: of the GPU if there is one, otherwise of this process."""
    if prepared.runtime.device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _begin(run: RunDir, prepared: Prepared, writer: RunWriter) -> None:
    """Start or resume. If this is refused, run.yaml stays unchanged, because `tunesmith resume` uses it."""
    plan, is_main, fresh = prepared.plan, prepared.runtime.is_main, not run.checkpoints()
    if is_main:
        _refuse_another_run(run, prepared)
        if fresh:
            _write_start(run, prepared)
    rows, epochs = len(prepared.rows("train")), plan.fraction(plan.num_steps)
    run_id, per_epoch = prepared.identity.run_id, float(plan.epoch_ends[0])
    writer.begin(RunStarted(run_id, 0, plan.num_steps, per_epoch, epochs, rows, time.time()))
    if is_main and not fresh:
        _write_start(run, prepared)


def _write_start(run: RunDir, prepared: Prepared) -> None:
    from tunesmith.pipeline.results import write_data_summary

    write_file(run.config_file, dump_config(prepared.config).encode())
    environment = {"run_id": prepared.identity.run_id, "device": str(prepared.runtime.device), **describe_environment()}
    write_file(run.environment_file, json.dumps(environment, indent=1).encode())
    write_data_summary(run, prepared)


# The run folder


def is_finished(run: RunDir) -> bool:
    """Return whether the run completed: its event log says so, and model and report exist."""
    return end_of(run) is not None


def finished_error(run: RunDir, *, same: bool) -> CheckpointError:
    """Return the error for a folder whose run must not be overwritten."""
    return CheckpointError(
        f"contains a finished run of {'this' if same else 'a different'} config",
        where=str(run.path),
        fix="Set a different --output_dir or --run_name, or remove the folder to train again."
        + ("" if run.report_file.exists() else f" `tunesmith report {run.path}` writes its report."),
    )


NOT_COMPARED = frozenset(
    ["output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "logging_steps", "cache_dir"]
)
"""Options that do not change the experiment."""


def choose_folder(config: RunConfig, *, in_memory: bool = False) -> tuple[RunConfig, str | None]:
    """Return the config with its run folder, and a message if it is not the default one.

    With `output_dir`, a finished run in it is refused before anything loads. Without it, a folder that contains a run with
    different settings is skipped, and so is a finished run on data in memory, which no config identifies.
    """
    if config.resume_from_checkpoint:
        return config, None
    first = config.run_folder
    if config.output_dir is not None:
        if is_finished(RunDir(first)):
            raise finished_error(RunDir(first), same=_has_same_settings(config, RunDir(first)))
        return config, None
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        run = RunDir(folder)
        if not os.path.isfile(run.config_file):  # False for a name that no file can have
            break
        if _has_same_settings(config, run):
            if not is_finished(run):
                break
            if not in_memory:
                raise finished_error(run, same=True)
    if number == 1:
        return config, None
    note = f"{first} contains a run with different settings or data: this run is written to {folder}."
    return replace(config, output_dir=str(folder)), note


def _has_same_settings(config: RunConfig, run: RunDir) -> bool:
    if not run.config_file.is_file():
        return False
    try:
        stored = to_dict(load_config(run.config_file, need_data=False))
    except TunesmithError:
        return True  # damaged: the run itself decides about the folder
    usual = to_dict(RunConfig())
    # run.yaml contains the values that the recipe chose: an option that is not set is not a difference.
    return all(
        value in (stored[name], usual[name]) for name, value in to_dict(config).items() if name not in NOT_COMPARED
    )


def free_folder(folder: Path) -> Path:
    """Return the folder, or folder-2, folder-3, ...: the first that is new, empty or contains an unfinished run."""

    def is_free(name: Path) -> bool:
        if not os.path.lexists(name) or (name.is_dir() and not any(name.iterdir())):
            return True
        return is_run(RunDir(name)) and not RunDir(name).report_file.exists()

    names = (folder.with_name(f"{folder.name}-{n}") if n > 1 else folder for n in count(1))
    return next(filter(is_free, names))


def _require_folder(config: RunConfig, run: RunDir) -> None:
    if config.resume_from_checkpoint and is_finished(run):
        raise finished_error(run, same=True)
    require_own_folder(run, {name: getattr(config, name) for name in INPUTS}, cache=config.cache_dir)
    if config.resume_from_checkpoint and not run.checkpoints():
        raise CheckpointError(
            "contains no checkpoint to resume from",
            where=str(run.path),
            fix="Omit --resume_from_checkpoint to start the run, or set --output_dir to the folder of the run.",
        )


def _refuse_another_run(run: RunDir, prepared: Prepared) -> None:
    """Refuse to overwrite a finished run, or results of a different config without a checkpoint to compare with."""
    finished = is_finished(run)
    if run.checkpoints() and not finished:
        return  # stopped: the checkpoints say whether it is the same run
    events = read_journal(run.journal_file) if run.journal_file.exists() else []
    started = next((e.run_id for e in events if isinstance(e, RunStarted)), None)
    same = started == prepared.identity.run_id
    if finished or any(isinstance(e, RunEnded) and e.finished for e in events[-1:]):
        raise finished_error(run, same=same)
    results = [p.name for p in (*run.folders, *run.result_files, run.report_file) if p.exists()]
    if results and not same:
        kind = "of a different config" if events else f"without their event log ({run.journal_file.name})"
        raise CheckpointError(
            f"contains results ({', '.join(results[:3])}) {kind}",
            where=str(run.path),
            fix="Set a different --output_dir, or remove the folder to train again.",
        )
