"""`tunesmith resume RUN`: continues a run that was stopped, exactly where it was, from its own run.yaml."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.cli.parser import add_flag
from tunesmith.config.options import RunConfig
from tunesmith.runs.folder import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "run_folder RUN", "run folder")
    add_flag(parser, "--allow_changed_data", "resume although the data or the config changed (noted in the run)")
    add_flag(parser, "--disable_tqdm", "plain lines instead of progress bars")


def run(args: argparse.Namespace) -> int:
    """Trains on and prints the scores; gives the exit code. A finished run has nothing left to do, which is not an error."""
    from tunesmith.runs.doctor import end_of

    folder = RunDir(args.run_folder)
    end = end_of(folder)
    if end is not None:
        print(f"{folder.path}: finished after step {end.step} ({end.reason}); there is nothing to resume")
        return 0
    from tunesmith.cli.train import train

    config = config_of_run(folder)
    if args.allow_changed_data:
        config = replace(config, allow_changed_data=True)
    if args.disable_tqdm:
        config = replace(config, disable_tqdm=True)
    return train(config)


def config_of_run(folder: RunDir) -> RunConfig:
    """The config of a run, with its relative paths as they were meant where the run was started."""
    from tunesmith.config.load import load_config
    from tunesmith.errors import ConfigError
    from tunesmith.runs.folder import BEST_OPTIONS, open_run

    started = folder.path / BEST_OPTIONS
    file = started if started.is_file() else folder.config_file  # the options as given, before best chose among them
    if not file.is_file():
        open_run(folder.path)
        raise ConfigError("is not there", where=str(folder.config_file), fix="Give the command of the run once more.")
    config = replace(load_config(file, need_data=False), output_dir=str(folder.path))
    if not (config.train_file or config.dataset_name or config.task_name):
        raise ConfigError(
            "names no data file: its rows were given in Python",
            where=str(folder.config_file),
            fix="Call finetune(...) again with the same rows and the same output_dir.",
        )
    home = _home_of(folder)
    for name in ("train_file", "validation_file", "test_file", "model_name_or_path", "tokenizer_name", "cache_dir"):
        value = getattr(config, name)
        if isinstance(value, str) and not Path(value).exists() and (home / value).exists():
            moved: dict[str, Any] = {name: str(home / value)}
            config = replace(config, **moved)
    return config


def _home_of(folder: RunDir) -> Path:
    """The folder that the run was started in."""
    from tunesmith.errors import CheckpointError
    from tunesmith.runs.folder import read_environment

    try:
        return Path(read_environment(folder.environment_file).get("folder") or "")
    except CheckpointError:
        return Path()
