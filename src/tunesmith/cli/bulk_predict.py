"""`tunesmith predict RUN --input 'big/*.parquet' --output out/`: many files, several processes, resumed by the same command."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tunesmith.cli.trained_model import chosen_names, load_predictor, reading_options


def is_bulk(args: argparse.Namespace) -> bool:
    """Whether many files are asked for: a pattern or a folder as input, or a folder as output."""
    if args.input in (None, "-"):
        return False
    many = any(c in args.input for c in "*?[") or os.path.isdir(args.input) or "://" in args.input
    out = args.output is not None and (args.output.endswith("/") or os.path.isdir(args.output) or "://" in args.output)
    return many or out


def predict_many(facts: Any, args: argparse.Namespace) -> int:
    """Works off the job, with `--workers` processes; gives the exit code."""
    from tunesmith.bulk.places import open_place
    from tunesmith.bulk.units import find_inputs
    from tunesmith.bulk.work import BulkJob, join_job, work_off
    from tunesmith.errors import ConfigError

    if args.output is None or (Path(args.output).suffix and not args.output.endswith("/")):
        raise ConfigError("many files need a folder to write to", fix="Give --output FOLDER/.")
    text = chosen_names(args) or facts.text_columns
    if text is None:
        raise ConfigError("the text columns of this model are not known", fix="Give --text_column_names.")
    options = reading_options(args)
    empty = options.pop("allow_empty_text")
    options.pop("sheet_name", None)
    job = BulkJob(find_inputs(args.input), open_place(args.output), tuple(text), args.top_k, options, empty, args.bf16)
    share = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, len(os.sched_getaffinity(0)) // args.workers)
    again, threads = join_job(job, args.run, where=args.output, threads=share)
    if again:
        with_threads = f", with {threads} threads a process" if threads != share else ""
        print(f"{args.output}: joins or resumes the job that is there{with_threads}", file=sys.stderr)
    helpers = [_start_worker() for _ in range(args.workers - 1)]
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        print(f"{done:,} rows predicted by this process", file=sys.stderr)

    try:
        work_off(job, load_predictor(args, threads=threads), count)
    finally:
        for helper in helpers:
            helper.wait()
    print(f"{args.output}: complete", file=sys.stderr)
    return 0


def _start_worker() -> subprocess.Popen[bytes]:
    """The same command once more. Should it die, the others do its work."""
    words = sys.argv[1:]
    at = next(i for i, word in enumerate(words) if word.split("=")[0] == "--workers")
    words[at : at + (1 if "=" in words[at] else 2)] = []
    return subprocess.Popen([sys.executable, "-m", "tunesmith", *words])
