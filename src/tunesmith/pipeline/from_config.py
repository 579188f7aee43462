"""From a config to a trained, evaluated, explained, loadable model: what `tunesmith train` runs; and which folder a run gets.

This door imports no torch: what is wrong with the options, the data or the name of the model is reported within a second or
two, before the heavy libraries load and before a run folder is made. A second try with another setting gets the next free
folder beside the first.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tunesmith.config.check import DATA_SOURCES
from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.events import RunEnded
from tunesmith.pipeline.inputs import read_run_data, refuse_what_is_not_built
from tunesmith.pipeline.watch import RunEnding, RunResult, Watch
from tunesmith.runs.environment import read_launch
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, is_run, require_own_folder
from tunesmith.runs.lock import RunLock
from tunesmith.runs.manifest import verify

INPUTS = (
    *("model_name_or_path", "tokenizer_name", "config_name", "dataset_name"),
    *("train_file", "validation_file", "test_file", "labels_file"),
)
"""Options that may name a folder or file which the run reads."""

__all__ = ["RunResult", "Watch", "finetune", "is_complete"]


def finetune(
    config: RunConfig | None = None,
    *,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    watch: Watch | None = None,
    use_test: bool = True,
    ending: RunEnding | None = None,
    **options: Any,
) -> RunResult:
    """Trains, evaluates and exports one run; resumes it if its folder holds an unfinished one.

    Data comes from the config's files or names, or as a Dataset, DatasetDict, DataFrame or list of dicts. Without `use_test`
    the test rows are neither predicted nor scored: one run of many is chosen without them. `ending`: see `RunEnding`.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    config = _resolve(config, options, has_data=train_data is not None)
    refuse_what_is_not_built(config, one_of_many=ending is not None)
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        raise ConfigError(
            "folds and seeds ask for several runs, and finetune trains one",
            fix="Call tunesmith.pipeline.repeats.run_repeats(config, Watch()), or give one fold.",
        )
    watch = watch or Watch()
    config, moved = choose_folder(config, in_memory=train_data is not None)
    run, launch = RunDir(config.run_folder), read_launch()
    first = launch.rank == 0
    if moved is not None and first:
        watch.say(moved)
    if first:
        _require_folder(config, run)
    # Several ranks read one after the other: the first builds the table that the others find.
    read = partial(read_run_data, config, data, use_test=use_test)
    found = read(progress=watch.progress) if launch.world == 1 else None
    # One rank holds the lock for all of them.
    with RunLock(run.lock_file) if first else nullcontext():
        from tunesmith.pipeline.drive import train_run
        from tunesmith.pipeline.prepare import prepare, start_runtime
        from tunesmith.training.distributed import rank_watch

        runtime = start_runtime(config)
        heard = watch if runtime.is_main else Watch()
        with rank_watch(runtime):
            prepared = prepare(config, runtime, lambda: found or read(progress=heard.progress), heard)
            return train_run(run, prepared, heard, ending)


def _require_folder(config: RunConfig, run: RunDir) -> None:
    require_own_folder(run, {name: getattr(config, name) for name in INPUTS}, cache=config.cache_dir)
    if config.resume_from_checkpoint and not run.checkpoints():
        raise CheckpointError(
            "holds no checkpoint to resume from",
            where=str(run.path),
            fix="Leave --resume_from_checkpoint out to start the run, or give the --output_dir of the run.",
        )


def _resolve(config: RunConfig | None, options: dict[str, Any], *, has_data: bool) -> RunConfig:
    """The config with the options over it, checked like a command line."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if given or config is None:
        config = load_config(None, given, need_data=not has_data, start=config)
    named = next((name for name in DATA_SOURCES if getattr(config, name) is not None), None)
    if has_data and named not in (None, "task_name"):
        raise ConfigError(f"train_data is given beside {named}", fix="Give one source of training rows.")
    return config


def is_complete(path: str | Path) -> bool:
    """Whether a run folder holds a finished run with an intact model."""
    run = RunDir(path)
    if not run.model.is_dir():
        return False
    verify(run.model)
    return any(isinstance(e, RunEnded) for e in read_journal(run.journal_file))


NOT_COMPARED = frozenset(
    ["output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "logging_steps", "cache_dir"]
)
"""Options that do not change the experiment."""


def choose_folder(config: RunConfig, *, in_memory: bool = False) -> tuple[RunConfig, str | None]:
    """The config with its run folder, and a line about the choice if it needs one.

    Without an output_dir, a folder that holds a run of other settings is left alone and the next free one is taken; with
    one, a finished run is refused here, before anything loads. Rows in memory are not named in a config: a finished run of
    such rows is always left alone.
    """
    if config.resume_from_checkpoint:
        return config, None
    if config.output_dir is not None:
        _refuse_finished(config, RunDir(config.run_folder))
        return config, None
    first = config.run_folder
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        run = RunDir(folder)
        if not os.path.isfile(run.config_file):  # False for a name that no file can have
            break
        same = _same_settings(config, run)
        if same and not is_finished(run):
            break
        if same and not in_memory:
            _refuse_finished(config, run)
    if number == 1:
        return config, None
    note = f"{first} holds a run with other settings or data: this one goes to {folder}."
    return replace(config, output_dir=str(folder)), note


def is_finished(run: RunDir) -> bool:
    """Whether the run came to its end. One that was killed before its report was written did not: a resume finishes it."""
    if run.checkpoints() and not run.report_file.is_file():
        return False
    try:
        events = read_journal(run.journal_file) if os.path.isfile(run.journal_file) else []
    except TunesmithError:
        return False  # damaged: a resume reports how
    return bool(events) and isinstance(events[-1], RunEnded) and events[-1].finished


def _same_settings(config: RunConfig, run: RunDir) -> bool:
    try:
        stored = load_config(run.config_file, need_data=False)
    except TunesmithError:
        return True  # not a config of ours: the run itself decides about the folder
    asked, there, usual = _compared(config), _compared(stored), _compared(RunConfig())
    # A run writes down what its recipe chose: what was not asked for is not a difference.
    return all(value in (there[name], usual[name]) for name, value in asked.items())


def _compared(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in to_dict(config).items() if name not in NOT_COMPARED}


def _refuse_finished(config: RunConfig, run: RunDir) -> None:
    if not os.path.isdir(run.model) or not is_finished(run):
        return
    what = "this very" if run.config_file.is_file() and _same_settings(config, run) else "another"
    raise CheckpointError(
        f"holds a finished run of {what} config",
        where=str(run.path),
        fix="Give another --output_dir or --run_name, or remove the folder to train again."
        + (f" `tunesmith report {run.path}` writes the page." if not run.report_file.exists() else ""),
    )


def free_folder(folder: Path) -> Path:
    """The folder, or folder-2, folder-3, ...: the first that is new, empty or holds an unfinished run."""

    def is_free(name: Path) -> bool:
        if not os.path.lexists(name) or (name.is_dir() and not any(name.iterdir())):
            return True
        return is_run(RunDir(name)) and not RunDir(name).report_file.exists()

    names = (folder.with_name(f"{folder.name}-{n}") if n > 1 else folder for n in count(1))
    return next(filter(is_free, names))
