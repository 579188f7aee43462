"""`tunesmith plan`: time, memory and disk of a run before it is started, from a few of its real steps on this machine.

Takes the options of `tunesmith train`. All conflicts between them are listed at once (exit code 2).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tunesmith.cli.console import format_bytes, format_duration
from tunesmith.cli.parser import add_config_arguments, config_from_args
from tunesmith.session.forecast import Forecast, forecast_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of a run, and the form of the answer."""
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_config_arguments(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """Prints the forecast; gives the exit code."""
    config = config_from_args(args)
    found = forecast_run(config)
    print(
        json.dumps(found.to_json(), indent=1)
        if args.json
        else "\n".join(describe_forecast(found, Path(config.run_folder)))
    )
    return 0


def describe_forecast(found: Forecast, folder: Path) -> list[str]:
    """One line for each thing that is spent, and what is not there."""
    parts = {
        "to read, tokenize and load": found.start_seconds,
        f"for {found.steps:,} steps": found.step_seconds,
        "for evaluations": found.evaluation_seconds,
        "to score, export and report": found.finish_seconds,
    }
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    lines = [
        f"plan: {format_duration(found.seconds)} on {found.device}",
        *(f"  {format_duration(seconds):>10}  {what}" for what, seconds in parts.items()),
        f"  {format_bytes(found.peak_bytes):>10}  of memory at most",
        f"  {format_bytes(found.disk_bytes):>10}  on disk while it runs; {format_bytes(free)} are free in {there}",
    ]
    if free < found.disk_bytes:
        lines.append("warning: the disk is too small. Give --output_dir on another one, or --save_total_limit 1.")
    return lines
