"""From a config to a trained, evaluated, explained, loadable model: what `tunesmith train` runs.

This door imports no torch: what is wrong with the options, the data or the name of the model is said within a second or
two, before the heavy libraries load and before a run folder is made.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config.check import DATA_SOURCES
from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.events import RunEnded
from tunesmith.run.environment import read_launch
from tunesmith.run.layout import RunDir
from tunesmith.run.ledger import require_own_folder, start_ledger
from tunesmith.run.lock import RunLock
from tunesmith.run.milestones import reach
from tunesmith.run.reader import read_journal
from tunesmith.run.sealed import verify
from tunesmith.session.ending import RunEnding
from tunesmith.session.inputs import read_run_data
from tunesmith.session.next_folder import choose_folder
from tunesmith.session.refused import refuse_what_is_not_built
from tunesmith.session.result import RunResult
from tunesmith.session.watch import Watch

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
    the test rows are neither predicted nor scored: one run of many is chosen without them. `ending`: see its class.
    """
    data = {"train": train_data, "validation": validation_data, "test": test_data}
    config = _resolve(config, options, has_data=train_data is not None)
    refuse_what_is_not_built(config, one_of_many=ending is not None)
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        raise ConfigError(
            "folds and seeds ask for several runs, and finetune trains one",
            fix="Call tunesmith.session.repeats.run_repeats(config, Watch()), or give one fold.",
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
    found = watch.aside.start(read, progress=watch.progress)() if launch.world == 1 else None
    reach("data")
    # One rank holds the lock for all of them.
    with RunLock(run.lock_file) if first else nullcontext():
        if first:
            start_ledger(run.path, run.remade_files)
        from tunesmith.ranks.roster import rank_watch
        from tunesmith.session.drive import train_run
        from tunesmith.session.prepare import prepare, start_runtime

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
