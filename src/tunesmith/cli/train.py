"""Fine-tune a model on labeled text. The same command continues a run that was stopped."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.cli.parser import add_config_arguments, add_flags, config_from_args
from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig
from tunesmith.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tunesmith.pipeline.results import RunResult
    from tunesmith.pipeline.train import RunObserver
    from tunesmith.runs.folder import RunDir

Made = TypeVar("Made")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option of a run."""
    add_flags(parser, {"-v --verbose": "Print every decision with its reason."})
    add_config_arguments(parser, run_folder=True)


def run(args: argparse.Namespace) -> int:
    """Train, print the scores and return the exit code. With a finished run folder there is nothing to do."""
    given = None if args.config_file is None else Path(args.config_file)
    if given is not None and not given.exists() and given.suffix not in (".yaml", ".yml"):
        raise ConfigError("does not exist", where=str(given), fix="Name a config file (.yaml) or a run folder.")
    if given is None or not given.is_dir():
        return train(config_from_args(args), verbose=args.verbose)
    from tunesmith.runs.folder import RunDir, end_of

    folder = RunDir(given)
    end = end_of(folder)
    if end is not None:
        print(f"{folder.path}: finished after step {end.step} ({end.reason}); there is nothing to resume")
        return 0
    return train(load_config(None, args.given, start=config_of_run(folder)), verbose=args.verbose)


def config_of_run(folder: RunDir) -> RunConfig:
    """Return the config of a run. Relative paths are resolved in the folder where the run was started."""
    from tunesmith.runs.folder import BEST_OPTIONS, open_run, read_environment

    started = folder.path / BEST_OPTIONS
    file = started if started.is_file() else folder.config_file  # the options as set, before --recipe best changed them
    if not file.is_file():
        open_run(folder.path)
        raise ConfigError("does not exist", where=str(folder.config_file), fix="Run the training command again.")
    config = replace(load_config(file, need_data=False), output_dir=str(folder.path))
    if not (config.train_file or config.dataset_name or config.task_name):
        raise ConfigError(
            "names no data file: the data was passed in Python",
            where=str(folder.config_file),
            fix="Call finetune(...) again with the same data and the same output_dir.",
        )
    home = Path()
    with suppress(CheckpointError):
        home = Path(read_environment(folder.environment_file).get("folder") or "")
    for name in ("train_file", "validation_file", "test_file", "model_name_or_path", "tokenizer_name", "cache_dir"):
        value = getattr(config, name)
        if isinstance(value, str) and not Path(value).exists() and (home / value).exists():
            moved: dict[str, Any] = {name: str(home / value)}
            config = replace(config, **moved)
    return config


def train(config: RunConfig, *, verbose: bool = False) -> int:
    """Train a config and print the results on rank 0."""
    from tunesmith.runs.folder import read_launch  # imports numpy, which `--help` doesn't need

    launch = read_launch()
    if launch.world > 1 and (config.trains_several or config.recipe == "best"):
        what = "--folds and --seeds train" if config.trains_several else "--recipe best trains"
        raise ConfigError(f"{what} one run after the other in one process", fix="Start the command without a launcher.")
    if config.trains_several:
        return _train_repeats(config, verbose)
    if config.recipe == "best":
        return _train_best(config, verbose)
    first = launch.rank == 0
    if not first:
        logging.getLogger("tunesmith").setLevel(logging.ERROR)
    result = train_on_console(config, verbose=verbose)
    from tunesmith.training.distributed import leave_ranks

    leave_ranks()
    if first:
        print_result(result)
    return 0


def train_on_console(config: RunConfig, *, verbose: bool = False) -> RunResult:
    """Train a config with progress on stderr."""
    import_torch_in_background()
    from tunesmith.pipeline.train import finetune

    return with_console(config, lambda observer: finetune(config, observer=observer), verbose=verbose)


def import_torch_in_background() -> None:
    """Import torch in a thread while the caller reads the data. An import error is raised by the caller's own import."""

    def load() -> None:
        with suppress(Exception):
            import_module("torch")  # not transformers: `datasets` must not see it partially imported

    threading.Thread(target=load, name="import torch").start()


def with_console(config: RunConfig, job: Callable[[RunObserver], Made], *, verbose: bool = False) -> Made:
    """Run the job with its messages and events on stderr and return its result."""
    from tunesmith.cli.console import Console, quiet_libraries

    quiet_libraries()
    console = Console(
        bars=None if config.disable_tqdm is None else not config.disable_tqdm,
        logging_steps=config.logging_steps,
        verbose=verbose,
    )
    try:
        return job(console.observer())
    finally:
        console.close()


def _train_repeats(config: RunConfig, verbose: bool) -> int:
    """Train a run per fold and seed, then print the pooled scores."""
    from tunesmith.pipeline.folds import run_repeats

    found = with_console(config, lambda observer: run_repeats(config, observer), verbose=verbose)
    for seed, scores in found.pooled.items():
        print(f"\nheld-out examples, seed {seed} (runs: {len(found.runs) // len(found.pooled)}), with 95% intervals:")
        width = max((len(name) for name in scores), default=0)
        for name, score in scores.items():
            print(f"  {name:<{width}}  {score.text()}")
    if len(found.pooled) > 1:
        print(f"\nover {len(found.pooled)} seeds:")
        for name, (mean, deviation) in found.spread().items():
            print(f"  {name}  mean {mean:.4f}, standard deviation {deviation:.4f}")
    folder = shlex.quote(str(found.path))
    print(f"\nfolder: {found.path}   (repeats.json, {len(found.runs)} runs)\nnext:")
    print(f"  tunesmith compare {folder}/*/\n  tunesmith board {folder}")
    return 0


def _train_best(config: RunConfig, verbose: bool) -> int:
    """Train several models within the time budget; print them, then the results of the best one."""
    from tunesmith.tuning.best import run_best

    found = with_console(config, lambda observer: run_best(config, observer), verbose=verbose)
    print(f"\ntried in {found.table['seconds']:.0f} s (time budget: {config.time_budget}):")
    for one in found.table["tried"]:
        for name, run in one["runs"].items():
            score = f"{run['metric']} {abs(run['score']):.4f}" if run["score"] is not None else run["why"] or "trained"
            print(f"  {name}  {score}  ({one['what']}; {run['seconds']:.0f} s)")
    print(f"deployed: {found.table['deployed']}   (reasons: best.json)")
    print_result(found.result)
    return 0


def print_result(result: RunResult, commands: Sequence[str] = ()) -> None:
    """Print scores, diagnosis, run folder and the next commands."""
    print_scores(result)
    print_diagnosis(result)
    folder = shlex.quote(str(result.run.path))
    print(f"\nrun folder: {result.run.path}   (open report.html in a browser)\nnext:")
    usual = ("predict {} --input new.csv --output predictions.csv", "evaluate {} --test_file labeled.csv")
    for command in commands or [f"tunesmith {line.format(folder)}" for line in usual]:
        print(f"  {command}")


def print_scores(result: RunResult) -> None:
    """Print the scores of the last split with intervals, one line for each other split, and which weights were kept."""
    *others, last = list(result.scores.items()) or [("", {})]
    for split, found in others:
        shown = [f"{metric} {score.text(count=False)}" for metric, score in list(found.items())[:2]]
        rows = next((f" (n={score.n:,})" for score in found.values()), "")
        print(f"\n{split}{rows}: {', '.join(shown)}")
    split, found = last
    width = max((len(score.title(metric)) for metric, score in found.items()), default=0)
    if found:
        print(f"\n{split} scores, with 95% intervals:")
    for metric, score in found.items():
        print(f"  {score.title(metric):<{width}}  {score.text()}")
    if not result.scores:
        print("\nno scores: there is no labeled data to evaluate on. Set --validation_file or --test_file")
    if result.warnings and result.scores:
        count = len(result.warnings)
        plural = "s" if count > 1 else ""
        print(f"before you trust these scores: see the {count} data warning{plural} above and in report.html")
    if result.best_step is not None:
        print(f"kept the weights of step {result.best_step} of {result.steps} (best validation score)")
    else:
        print(f"kept the weights of the last step, {result.steps}")


def print_diagnosis(result: RunResult) -> None:
    """Print the diagnosis of the learning curves."""
    if result.diagnosis:
        print("\ndiagnosis:")
        for line in result.diagnosis:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            print(
                textwrap.fill(
                    line.strip(),
                    _width(),
                    initial_indent=indent,
                    subsequent_indent=f"{indent}  ",
                    break_on_hyphens=False,
                )
            )


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
