"""Which folder a run gets: a second try with another setting gets the next free one beside the first."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import CheckpointError, TunesmithError
from tunesmith.events import RunEnded
from tunesmith.run.doctor import FINISHED
from tunesmith.run.layout import RunDir
from tunesmith.run.ledger import is_run
from tunesmith.run.reader import read_journal

NOT_COMPARED = frozenset(
    ["output_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "logging_steps", "cache_dir"]
)
"""Options that do not make another experiment of a run."""


def choose_folder(config: RunConfig, *, in_memory: bool = False) -> tuple[RunConfig, str | None]:
    """The config with its run folder, and what to say about it.

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
    """Whether the run came to its end. One that was killed before its report was written is not: resuming finishes it."""
    if run.checkpoints() and not run.report_file.is_file():
        return False
    try:
        events = read_journal(run.journal_file) if os.path.isfile(run.journal_file) else []
    except TunesmithError:
        return False  # damaged: resuming it says how
    return bool(events) and isinstance(events[-1], RunEnded) and events[-1].reason in FINISHED


def _same_settings(config: RunConfig, run: RunDir) -> bool:
    try:
        stored = load_config(run.config_file, need_data=False)
    except TunesmithError:
        return True  # not a config of ours: what stands there is judged by the run itself
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
