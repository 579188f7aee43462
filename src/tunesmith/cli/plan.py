"""Estimate time, memory and disk of a run from a few real steps on this machine.

Accepts the options of `tunesmith train`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from tunesmith.cli.console import format_bytes, format_duration, quiet_libraries
from tunesmith.cli.parser import add_config_arguments, add_flag, config_from_args
from tunesmith.cli.train import import_torch_in_background
from tunesmith.config.options import RunConfig
from tunesmith.errors import ResourceError
from tunesmith.pipeline.inputs import read_run_data, refuse_what_is_not_built
from tunesmith.pipeline.plan import Forecast
from tunesmith.pipeline.train import RunObserver


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
    """Measure in a new process, so that its peak memory is that of one run."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as pool:
        try:
            return pool.submit(_measure_here, config, time.time()).result()
        except BrokenProcessPool:
            fix = "If the system is out of memory, use a smaller batch or --max_seq_length."
            raise ResourceError("the process that measures some steps was killed", fix=fix) from None


def _begin() -> None:
    """Discard what libraries print in the process that measures, and end it if its parent is killed."""

    def watch(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, args=(parent_process(),), daemon=True).start()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    quiet_libraries()


def _measure_here(config: RunConfig, begun: float) -> Forecast:
    observer = RunObserver()
    import_torch_in_background()
    data = read_run_data(config, {}, progress=observer.progress)
    from tunesmith.pipeline.plan import measure_run

    return measure_run(config, data, observer, begun)
