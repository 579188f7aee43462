"""Estimate time, memory and disk of a run from a few real steps on this machine.

Accepts the options of `tunesmith train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tunesmith.cli.console import format_bytes, format_duration, quiet_libraries
from tunesmith.cli.parser import add_config_arguments, add_flags, config_from_args
from tunesmith.cli.train import import_torch_in_background
from tunesmith.pipeline.inputs import refuse_what_is_not_built
from tunesmith.pipeline.plan import Forecast, measure_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of a run."""
    add_flags(parser, {"--json": "Print JSON."})
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the estimate and return the exit code."""
    config = config_from_args(args)
    refuse_what_is_not_built(config)
    quiet_libraries()
    import_torch_in_background()
    found = measure_run(config)
    lines = [json.dumps(found.to_json(), indent=1)] if args.json else describe_forecast(found, Path(config.run_folder))
    print("\n".join(lines))
    return 0


def describe_forecast(found: Forecast, folder: Path) -> list[str]:
    """Return one line per resource, and a warning if the disk is too small."""
    parts = {
        "to read, tokenize and load": found.start_seconds + found.once_seconds,
        f"for {found.steps:,} steps": found.step_seconds,
        "for evaluations": found.evaluation_seconds,
        "to score, export and report": found.finish_seconds,
    }
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    lines = [
        f"plan: {format_duration(found.seconds)}{f' for {found.runs} runs' * (found.runs > 1)} on {found.device}",
        *(f"  {format_duration(seconds):>10}  {what}" for what, seconds in parts.items()),
        f"  {format_bytes(found.peak_bytes):>10}  of memory at peak",
        f"  {format_bytes(found.disk_bytes):>10}  on disk while it runs; {format_bytes(free)} are free in {there}",
    ]
    if free < found.disk_bytes:
        lines.append("warning: the disk is too small. Set --output_dir to a different disk, or --save_total_limit 1.")
    return lines
