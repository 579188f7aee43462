"""`tunesmith train`: from labelled text to a trained, evaluated, loadable model. The same command goes on after a crash."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from tunesmith.cli.arguments import add_config_arguments, config_from_args
from tunesmith.config.schema import RunConfig
from tunesmith.run.launcher import read_launch

if TYPE_CHECKING:
    from tunesmith.finetune import RunResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command: all options of a run."""
    add_config_arguments(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """Trains and prints the scores; gives the exit code."""
    return train(config_from_args(args))


def train(config: RunConfig) -> int:
    """Trains a config and prints what came out, on rank 0."""
    first = read_launch().rank == 0
    if not first:
        logging.getLogger("tunesmith").setLevel(logging.ERROR)
    result = train_on_console(config)
    from tunesmith.train.runtime import leave_ranks  # with torch, so only when there is something to leave

    leave_ranks()
    if first:
        print_scores(result)
        print_diagnosis(result)
        print_next(result)
    return 0


def train_on_console(config: RunConfig) -> RunResult:
    """Trains a config with bars or lines on stderr."""
    from tunesmith.cli.console import Console, quiet_libraries
    from tunesmith.finetune import finetune

    quiet_libraries()
    console = Console(
        bars=None if config.disable_tqdm is None else not config.disable_tqdm,
        logging_steps=config.logging_steps,
        logging_strategy=config.logging_strategy,
        logging_first_step=config.logging_first_step,
    )
    try:
        return finetune(config, watch=console.watch())
    finally:
        console.close()


def print_scores(result: RunResult) -> None:
    """Every score with its interval, and which weights were scored."""
    width = max((len(m) for found in result.scores.values() for m in found), default=0)
    for split, found in result.scores.items():
        print(f"\n{split} scores, with 95% intervals:")
        for metric, score in found.items():
            print(f"  {metric:<{width}}  {score.text()}")
    if not result.scores:
        print("\nno labelled rows to score: give --validation_file or --test_file")
    if result.best_step is not None:
        print(f"\nweights: those of step {result.best_step}, the best of {result.steps} steps")
    else:
        print(f"\nweights: those after the last step, {result.steps}")


def print_diagnosis(result: RunResult) -> None:
    """What the curves say."""
    if result.diagnosis:
        print("\ndiagnosis:")
        for line in result.diagnosis:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            print(textwrap.fill(line.strip(), _width(), initial_indent=indent, subsequent_indent=f"{indent}  "))


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def print_next(result: RunResult) -> None:
    """Where everything is, and what to do with it."""
    folder = shlex.quote(str(result.run.path))
    print(f"\nrun folder: {result.run.path}   (report.html, curves.png, README.md, model/)\nnext:")
    print(f"  tunesmith predict {folder} --input new.csv --output labelled.csv")
    print(f"  tunesmith evaluate {folder} --test_file labelled.csv")
    print(f"  tunesmith curves {folder}")
