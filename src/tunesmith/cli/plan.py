"""Estimate time, memory and disk of a run from a few real steps on this machine.

Accepts the options of `tunesmith train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunesmith.cli.console import format_bytes, format_duration, quiet_libraries
from tunesmith.cli.parser import add_config_arguments, add_flag, config_from_args
from tunesmith.cli.train import import_torch_in_background
from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig, to_dict
from tunesmith.errors import ConfigError, ResourceError, TunesmithError, name_the_extra
from tunesmith.pipeline.inputs import read_run_data, refuse_what_is_not_built
from tunesmith.pipeline.plan import Forecast
from tunesmith.pipeline.train import RunObserver

ERROR_MARK = "tunesmith-forecast-error: "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of a run."""
    add_flag(parser, "--json", "Print JSON.")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the estimate and return the exit code."""
    config = config_from_args(args)
    found = forecast_run(config)
    print(
        json.dumps(found.to_json(), indent=1)
        if args.json
        else "\n".join(describe_forecast(found, Path(config.run_folder)))
    )
    return 0


def describe_forecast(found: Forecast, folder: Path) -> list[str]:
    """Return one line per resource, and a warning if the disk is too small."""
    parts = {
        "to read, tokenize and load": found.start_seconds + found.once_seconds,
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
        f"  {format_bytes(found.peak_bytes):>10}  of memory at peak",
        f"  {format_bytes(found.disk_bytes):>10}  on disk while it runs; {format_bytes(free)} are free in {there}",
    ]
    if free < found.disk_bytes:
        lines.append("warning: the disk is too small. Set --output_dir to a different disk, or --save_total_limit 1.")
    return lines


def forecast_run(config: RunConfig) -> Forecast:
    """Measure a run. A short run is measured twice, so that files and kernels are cached."""
    refuse_what_is_not_built(config)
    found = _measure(config)
    return _measure(config) if found.is_short else found


def _measure(config: RunConfig) -> Forecast:
    """Measure in a child process, so that its peak memory is that of one run."""
    options = {name: _plain(value) for name, value in to_dict(config).items() if value is not None}
    sent = json.dumps({"begun": time.time(), "options": options})
    command = [sys.executable, "-m", "tunesmith.cli.plan"]
    done = subprocess.run(command, input=sent, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Forecast(**json.loads(lines[-1]))
    marked = [line for line in done.stderr.splitlines() if line.startswith(ERROR_MARK)]
    if marked:
        found = json.loads(marked[-1].removeprefix(ERROR_MARK))
        error = ConfigError(found["text"])
        error.exit_code = found["exit_code"]
        raise error
    tail = " ".join(done.stderr.split()[-30:])
    raise ResourceError(f"the measured steps ended with exit code {done.returncode}: {tail[-300:]}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def measure_from_stdin() -> None:
    """Run a few steps in the child process and print the estimate; a tunesmith error becomes one marked line on stderr."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    asked = json.load(sys.stdin)
    quiet_libraries()
    try:
        found = _measure_here(load_config(None, asked["options"]), asked["begun"])
    except TunesmithError as error:
        sys.exit(ERROR_MARK + json.dumps({"text": error.line(), "exit_code": error.exit_code}))
    print(json.dumps(asdict(found)), file=out, flush=True)


def _measure_here(config: RunConfig, begun: float) -> Forecast:
    observer = RunObserver()
    try:
        import_torch_in_background()
        data = read_run_data(config, {}, progress=observer.progress)
        from tunesmith.pipeline.plan import measure_run

        return measure_run(config, data, observer, begun)
    except ModuleNotFoundError as error:
        name_the_extra(error, "tunesmith plan")
        raise


if __name__ == "__main__":
    measure_from_stdin()
