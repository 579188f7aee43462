"""Step time of the whole engine beside transformers.Trainer on this machine: same model, same rows, taking turns.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/engine_cpu.py [--batch 8 32] [--rounds 5] [--steps 12] [--output FILE.json]

all-MiniLM-L6-v2, MRPC, fp32, dropout on. Three contestants run `--steps` steps each, in turn, `--rounds` times:
tunesmith as it is by default, the Trainer's defaults (random order), the Trainer with group_by_length. Printed: the
median time of a step and of a row, and the ratio to tunesmith. A turn's first two steps warm up and are not counted.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from records import write_record
from step_turns import our_turns, their_turns
from token_files import engine_rows, trainer_rows


def main() -> None:
    """Prints one table a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds of {args.steps} steps")
    rows = engine_rows("mrpc", "train")
    dicts = trainer_rows(rows)
    results: list[dict[str, Any]] = []
    for batch in args.batch:
        turns = {
            "tunesmith": our_turns(rows, batch),
            "Trainer, defaults": their_turns(dicts, batch, "random"),
            "Trainer, group_by_length": their_turns(dicts, batch, "group_by_length"),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(args.rounds):
            for name, take in turns.items():
                times[name] += take(args.steps)
        medians = {name: statistics.median(t) for name, t in times.items()}
        print(f"\nbatch {batch}                    ms a step   ms a row   times tunesmith")
        for name, median in medians.items():
            ratio = median / medians["tunesmith"]
            print(f"{name:<26} {1000 * median:9.1f} {1000 * median / batch:10.2f} {ratio:12.2f}")
            results.append({"batch": batch, "name": name, "step_ms": round(1000 * median, 1), "ratio": round(ratio, 2)})
    write_record(args.output, device="cpu", results=results, note=args.note)


if __name__ == "__main__":
    main()
