"""What a step costs against the batch size and against the length of the rows: ours and transformers.Trainer, taking turns.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/cost_sweep.py --output docs/research/performance/sweep_cpu.json
    PYTHONPATH=src python bench/cost_sweep.py --device cuda --precision bf16 --shape bert-base --output FILE.json

Two sweeps: batches of `--batch` rows of MRPC, and batches of 8 rows that have exactly `--length` tokens (no padding in
either, so only the engine is compared). The Trainer runs with its defaults. Each point: `--rounds` turns of `--steps` steps.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from records import write_record
from step_turns import our_turns, their_turns
from token_files import engine_rows, make_rows, trainer_rows
from tunesmith.data.tokens import TokenRows

LENGTH_BATCH = 8


def fixed_rows(length: int, count: int) -> TokenRows:
    """Rows that have exactly so many tokens: longer ones, cut."""
    rows, _ = make_rows(np.full(count, length + 20))
    taken = rows.take(np.arange(count))
    cut = {name: [[*row[: length - 1].tolist(), row[-1].item()] for row in found] for name, found in taken.items()}
    return TokenRows.from_lists({**cut, "labels": rows.labels})


def measure(rows: TokenRows, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Median ms a step of both."""
    options = {"device": args.device, "precision": args.precision, "shape": args.shape}
    turns = {
        "tunesmith": our_turns(rows, batch, **options),
        "trainer": their_turns(trainer_rows(rows), batch, **options),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(args.rounds):
        for name, take in turns.items():
            times[name] += take(args.steps)
    return {f"{name}_ms": round(1000 * statistics.median(t), 2) for name, t in times.items()}


def main() -> None:
    """Prints a line a point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--shape", choices=("minilm", "bert-base", "tiny"), default="minilm")
    parser.add_argument("--batch", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--length", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    points = [("batch size", batch) for batch in args.batch] + [("row length", length) for length in args.length]
    results: list[dict[str, Any]] = []
    for sweep, value in points:
        if sweep == "batch size":
            rows, batch = engine_rows("mrpc", "train"), value
        else:
            rows, batch = fixed_rows(value, LENGTH_BATCH * 200), LENGTH_BATCH
        found = measure(rows, batch, args)
        ratio = round(found["trainer_ms"] / found["tunesmith_ms"], 2)
        results.append({"sweep": sweep, "value": value, **found, "ratio": ratio})
        print(
            f"{sweep} {value:>4}: {found['tunesmith_ms']:>8.2f} ms a step, Trainer {found['trainer_ms']:>8.2f}, {ratio:.2f}",
            flush=True,
        )
    facts = {"device": args.device, "precision": args.precision, "shape": args.shape}
    write_record(args.output, device=args.device, results=[{**one, **facts} for one in results], note=args.note)


if __name__ == "__main__":
    main()
