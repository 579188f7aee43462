"""`tunesmith train`: from labelled text to a trained, evaluated, loadable model. The same command goes on after a crash."""

from __future__ import annotations

import argparse
import os
import shlex

from tunesmith.cli.arguments import add_config_arguments, config_from_args
from tunesmith.config.schema import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command: all options of a run."""
    add_config_arguments(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """Trains and prints the scores; gives the exit code."""
    return train(config_from_args(args))


def train(config: RunConfig) -> int:
    """Trains a config and prints what came out."""
    import logging

    from tunesmith.cli.console import Console
    from tunesmith.finetune import finetune

    for name in ("transformers", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    bars = None if config.disable_tqdm is None else not config.disable_tqdm
    console = Console(bars=bars, logging_steps=config.logging_steps)
    try:
        result = finetune(config, watch=console.watch())
    finally:
        console.close()
    if int(os.environ.get("RANK", "0")) == 0:
        _print_result(result)
    return 0


def _print_result(result: object) -> None:
    from tunesmith.finetune import RunResult

    assert isinstance(result, RunResult)
    print()
    width = max((len(m) for found in result.scores.values() for m in found), default=0)
    for split, found in result.scores.items():
        print(f"{split}:")
        for metric, score in found.items():
            print(f"  {metric:<{width}}  {score.text()}")
    if result.best_step is not None:
        print(f"weights of step {result.best_step} (best of {result.steps})")
    if result.diagnosis:
        print("\ndiagnosis:")
        for line in result.diagnosis:
            print(f"  {line}")
    folder = shlex.quote(str(result.run.path))
    print(f"\nrun folder: {result.run.path}\nnext:")
    print(f"  tunesmith predict {folder} --input new.csv --output labelled.csv")
    print(f"  tunesmith evaluate {folder} --test_file labelled.csv")
    print(f"  tunesmith curves {folder}      (picture: {result.run.curves_png}, report: {result.run.report_file})")
