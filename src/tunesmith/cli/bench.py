"""`tunesmith bench`: speed and memory on your model, data and machine, beside transformers.Trainer and a plain loop.

Each contestant is a process of its own; they take turns of some steps. Data, model and batch size are given as for train.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.cli.parser import add_config_arguments, add_flag, config_from_args
from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import ConfigError
from tunesmith.measure.contest import CONTESTANTS, kinds_for
from tunesmith.runs.environment import package_versions
from tunesmith.runs.writing import write_file

OTHERS = [kind for kind in CONTESTANTS if kind != "tunesmith"]
SCRIPTS = ("script", "script_bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command beside all options of a run."""
    add_flag(parser, "--rounds N", "turns of each contestant [3]", type=int, default=3)
    add_flag(parser, "--steps N", "steps of a turn [8]", type=int, default=8)
    add_flag(parser, "--against NAME", f"of {', '.join(OTHERS)} [what suits the device]", nargs="*")
    add_flag(
        parser,
        "--start_up",
        "time whole commands instead, phase by phase: train beside a script with transformers, predict --text",
    )
    add_flag(parser, "--filled_by STEPS", "with --start_up: caches are filled by runs of so many steps alone", type=int)
    add_flag(parser, "--script_rounds N", "with --start_up: rounds of the script [as of all]", type=int)
    add_flag(parser, "--json FILE", "also write the numbers to a file")
    add_config_arguments(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """Prints the table; gives the exit code."""
    from tunesmith.cli.console import quiet_libraries

    if args.rounds < 1 or args.steps < 1 or (args.script_rounds is not None and args.script_rounds < 1):
        raise ConfigError("--rounds, --steps and --script_rounds must be 1 or more")
    others = SCRIPTS if args.start_up else OTHERS
    unknown = [name for name in args.against or () if name not in others]
    if unknown:
        raise ConfigError(f"--against {unknown[0]} is not known", fix=f"Use {', '.join(others)}.")
    if args.json and not Path(args.json).resolve().parent.is_dir():  # before minutes of measuring, not after
        raise ConfigError(f"--json {args.json}: there is no such folder", fix="Make it first.")
    quiet_libraries()
    if args.start_up:
        _time_commands(config_from_args(args), args)
        return 0
    # Speed is compared on one and the same model and maths: those of transformers.
    _measure(replace(config_from_args(args), recipe="hf"), args)
    return 0


def _measure(config: RunConfig, args: argparse.Namespace) -> None:
    from tunesmith.measure.contest import run_contest
    from tunesmith.measure.hardware import bytes_per_step, measure_limits, operations_per_token
    from tunesmith.measure.same_maths import compare_losses
    from tunesmith.measure.table import failures_of, format_lines, lines_to_json, make_lines
    from tunesmith.measure.worker import make_prepared
    from tunesmith.pipeline.inputs import refuse_what_is_not_built

    refuse_what_is_not_built(config)
    prepared = make_prepared(config)  # tokens are in the cache from here on: start-up is compared without tokenizing
    import torch

    device, dtype = prepared.runtime.device, torch.bfloat16 if prepared.runtime.precision == "bf16" else torch.float32
    title = (
        f"{config.model_name_or_path or 'the default model'}, {len(prepared.rows('train')):,} rows, batch "
        f"{config.decided.per_device_train_batch_size}, {prepared.runtime.precision.replace('no', 'fp32')}, "
        f"{device} (threads: {torch.get_num_threads()}); {args.rounds} rounds of {args.steps} steps, taking turns"
    )
    print(title, flush=True)
    against = args.against or kinds_for(on_gpu=device.type == "cuda", half=bool(config.bf16 or config.fp16))
    kinds = ("tunesmith", *against)
    options = {k: v for k, v in to_dict(config).items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="tunesmith-bench-") as name:
        folder = Path(name)
        results = run_contest(options, kinds=kinds, rounds=args.rounds, steps=args.steps, folder=folder, say=_say)
        limits = measure_limits(device, dtype)
        lines = make_lines(
            results,
            steps=args.steps,
            operations=operations_per_token(prepared.state.model),
            moved=bytes_per_step(prepared.state.model),
            matrix_rate=limits.matrix_rate,
            copy_rate=limits.copy_rate,
        )
        pairs = compare_losses(prepared, name, steps=20)
    print(f"\n{format_lines(lines, failures_of(results))}\n")
    print(
        f"measured here: {limits.matrix_rate / 1e9:,.0f} GFLOP/s in matrix products, {limits.copy_rate / 1e9:.1f} GB/s "
        "copied\nof the products: 6 operations a weight and real token; of the copies: 40 bytes a trained weight and step, "
        "read or written"
    )
    worst = max(abs(a - b) for a, b in pairs)
    print(f"losses on the same {len(pairs)} batches, dropout off: at most {worst:.1e} apart from the Trainer's")
    if args.json:
        facts = {"what": title, "versions": package_versions(), "largest_loss_difference": worst}
        facts |= {"matrix_rate": limits.matrix_rate, "copy_rate": limits.copy_rate, "did_not_run": failures_of(results)}
        _write_numbers(args.json, lines_to_json(lines, **facts, losses=pairs))


def _time_commands(config: RunConfig, args: argparse.Namespace) -> None:
    """Whole commands: from the start of the process to its end."""
    from tunesmith.measure.start_up import Timed, format_phases, phases_to_json, time_commands
    from tunesmith.pipeline.inputs import read_run_data

    if config.train_file is None:
        raise ConfigError("--start_up needs --train_file: the script beside us reads files")
    epochs, rows = config.num_train_epochs or 3, config.per_device_train_batch_size or 8
    config = replace(config, num_train_epochs=epochs, per_device_train_batch_size=rows)
    found = read_run_data(config, {}, lambda what, done, total: None).bundle.columns
    kinds = ("train", *(("script",) if args.against is None else args.against), "predict", "import")
    title = f"{config.model_name_or_path or 'the default model'}, {config.train_file}, batch {rows}"
    filling = " after one that fills the caches" if args.filled_by is None else ""
    print(f"{title}; {args.rounds} rounds{filling}, taking turns", flush=True)

    def write(timed: Sequence[Timed]) -> None:
        if args.json:  # after each command: an interrupted measurement leaves what it has
            _write_numbers(args.json, phases_to_json(timed, what=title, versions=package_versions()))

    with tempfile.TemporaryDirectory(prefix="tunesmith-bench-") as name:
        columns = (tuple(found.text), str(found.label))
        options: dict[str, Any] = {"rounds": args.rounds, "filled_by": args.filled_by, "say": _say, "after": write}
        options["script_rounds"] = args.script_rounds
        timed = time_commands(config, columns, kinds=kinds, folder=Path(name), **options)
    print(f"\n{format_phases(timed)}")


def _write_numbers(file: str, numbers: Any) -> None:
    write_file(Path(file), (json.dumps(numbers, indent=1) + "\n").encode())
    print(f"written: {file}")


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
