"""`tunesmith train`: from labelled text to a trained, evaluated, loadable model. The same command continues after a crash."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from tunesmith.cli.parser import add_config_arguments, config_from_args
from tunesmith.config.options import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.environment import read_launch

if TYPE_CHECKING:
    from tunesmith.pipeline.watch import RunResult, Watch

Made = TypeVar("Made")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command: all options of a run."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains and prints the scores; gives the exit code."""
    return train(config_from_args(args))


def train(config: RunConfig) -> int:
    """Trains a config and prints the results, on rank 0."""
    first = read_launch().rank == 0
    if config.seeds > 1 or (config.folds is not None and config.fold is None):
        return _train_repeats(config)
    if config.recipe == "best":
        return _train_best(config)
    if not first:
        logging.getLogger("tunesmith").setLevel(logging.ERROR)
    result = train_on_console(config)
    from tunesmith.training.distributed import leave_ranks

    leave_ranks()
    if first:
        print_scores(result)
        print_diagnosis(result)
        print_next(result)
    return 0


def train_on_console(config: RunConfig) -> RunResult:
    """Trains a config with bars or lines on stderr."""
    import_torch_in_background()
    from tunesmith.pipeline.train import finetune

    return with_console(config, lambda watch: finetune(config, watch=watch))


def import_torch_in_background() -> None:
    """Import torch in a thread while the caller reads the data. An import error is raised by the caller's own import."""

    def load() -> None:
        with suppress(Exception):
            import_module("torch")  # not transformers: `datasets` must not meet it half imported

    threading.Thread(target=load, name="import torch").start()


def with_console(config: RunConfig, job: Callable[[Watch], Made]) -> Made:
    """The result of the job, with its messages and events on stderr."""
    from tunesmith.cli.console import Console, quiet_libraries

    quiet_libraries()
    console = Console(
        bars=None if config.disable_tqdm is None else not config.disable_tqdm,
        logging_steps=config.logging_steps,
    )
    try:
        return job(console.watch())
    finally:
        console.close()


def _train_repeats(config: RunConfig) -> int:
    """Folds and seeds: trains each run, then prints the pooled scores."""
    from tunesmith.pipeline.folds import run_repeats

    if read_launch().world > 1:
        raise ConfigError(
            "--folds and --seeds train one run after the other, on one rank", fix="Leave the launcher out."
        )
    found = with_console(config, lambda watch: run_repeats(config, watch))
    for seed, scores in found.pooled.items():
        print(f"\nheld-out rows of {len(found.runs) // len(found.pooled)} run(s), seed {seed}, with 95% intervals:")
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


def _train_best(config: RunConfig) -> int:
    """Trains many runs within a time budget for one model; prints the runs, then the results of the model."""
    from tunesmith.tuning.best import run_best

    if read_launch().world > 1:
        raise ConfigError("--recipe best trains one run after the other, on one rank", fix="Leave the launcher out.")
    found = with_console(config, lambda watch: run_best(config, watch))
    print(f"\ntried, in {found.table['seconds']:.0f} s of {config.time_budget}:")
    for one in found.table["tried"]:
        for name, run in one["runs"].items():
            score = f"{run['metric']} {abs(run['score']):.4f}" if run["score"] is not None else run["why"] or "trained"
            print(f"  {name}  {score}  ({one['what']}; {run['seconds']:.0f} s)")
    print(f"deployed: {found.table['deployed']}   (best.json says why)")
    print_scores(found.result)
    print_diagnosis(found.result)
    print_next(found.result)
    return 0


def print_scores(result: RunResult) -> None:
    """Prints every score with its interval, and which weights were scored."""
    width = max((len(s.title(m)) for found in result.scores.values() for m, s in found.items()), default=0)
    for split, found in result.scores.items():
        print(f"\n{split} scores, with 95% intervals:")
        for metric, score in found.items():
            print(f"  {score.title(metric):<{width}}  {score.text()}")
    if not result.scores:
        print("\nno labelled rows to score: give --validation_file or --test_file")
    if result.warnings and result.scores:
        print("\nbefore you trust these scores:")
        for line in result.warnings:
            print(textwrap.fill(line, _width(), initial_indent="  ", subsequent_indent="    "))
    if result.best_step is not None:
        print(f"\nkept the weights of step {result.best_step} of {result.steps} (best validation score)")
    else:
        print(f"\nkept the weights of the last step, {result.steps}")


def print_diagnosis(result: RunResult) -> None:
    """Prints the diagnosis of the curves."""
    if result.diagnosis:
        print("\ndiagnosis:")
        for line in result.diagnosis:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            print(textwrap.fill(line.strip(), _width(), initial_indent=indent, subsequent_indent=f"{indent}  "))


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def print_next(result: RunResult) -> None:
    """Prints the run folder and the next commands."""
    folder = shlex.quote(str(result.run.path))
    print(f"\nrun folder: {result.run.path}   (report.html, curves.png, README.md, model/)\nnext:")
    print(f"  tunesmith predict {folder} --input new.csv --output labelled.csv")
    print(f"  tunesmith evaluate {folder} --test_file labelled.csv")
    print(f"  tunesmith report {folder}")
