"""Train the bundled model on the bundled sample data: a few minutes on two cores, without a network."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from tunesmith.cli.parser import add_flags
from tunesmith.config.options import RunConfig

RECIPE = {
    "recipe": "hf",
    "learning_rate": 1e-4,
    "num_train_epochs": 5.0,
    "per_device_train_batch_size": 16,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags = {
        "--output_dir FOLDER": "Run folder. Default: runs/demo, or runs/demo-2 and so on if it exists.",
        "--max_steps N": "Number of optimizer steps. Default: 5 epochs.",
        "--disable_tqdm": "Print plain lines instead of progress bars.",
    }
    add_flags(parser, flags, max_steps=-1)


def run(args: argparse.Namespace) -> int:
    """Train, print scores and diagnosis, and suggest the next commands."""
    from tunesmith.cli.train import print_result, train_on_console

    config = make_config(args.output_dir, max_steps=args.max_steps, plain=args.disable_tqdm)
    print("Fine-tuning all-MiniLM-L6-v2 on sentence pairs: do two sentences say the same?", flush=True)
    result = train_on_console(config)
    folder = shlex.quote(str(result.run.path))
    example = f'tunesmith predict {folder} --text "The shop opens at 9." "It opens at 9."'
    print_result(result, (example, f"tunesmith report {folder}", "tunesmith train --train_file your.csv"))
    return 0


def make_config(output_dir: str | None = None, *, max_steps: int = -1, plain: bool = False) -> RunConfig:
    """Return the config of the demo. A finished demo is kept; an unfinished one is resumed."""
    from tunesmith.config.load import load_config
    from tunesmith.pipeline.inputs import free_folder
    from tunesmith.sample import SPLITS, sample_file

    files = {f"{split}_file": str(sample_file(split)) for split in SPLITS}
    switches = {"disable_tqdm": True} if plain else {}
    folder = output_dir or str(free_folder(Path("runs") / "demo"))
    return load_config(None, {**files, **RECIPE, **switches, "max_steps": max_steps, "output_dir": folder})
