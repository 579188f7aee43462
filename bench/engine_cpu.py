"""Step time of the whole engine beside transformers.Trainer on this machine: same model, same rows, taking turns.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/engine_cpu.py [--batch 8 32] [--rounds 5] [--steps 12] [--output FILE.json]

all-MiniLM-L6-v2, MRPC, fp32, dropout on. Three contestants, each in a process of its own, run `--steps` steps each, in turn,
`--rounds` times: tunesmith as `tunesmith train` sets it up, the Trainer's defaults (random order), the Trainer with
group_by_length. Printed: the median time of a step and of a row, and the ratio to tunesmith. A turn's first two steps warm up
and are not counted. With `--processor_time` processor time is counted, for a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from records import write_record

KINDS = {"tunesmith": "", "Trainer, defaults": "random", "Trainer, group_by_length": "group_by_length"}


def take_turns(kind: str, batch: int, processor_time: bool) -> None:
    """One contestant: for each line with a number of steps, a line with the seconds of each."""
    import step_turns
    from token_files import engine_rows, trainer_rows

    if processor_time:
        step_turns.time.perf_counter = time.process_time
    rows = engine_rows("mrpc", "train")
    if kind == "tunesmith":
        take = step_turns.our_turns(rows, batch)
    else:
        take = step_turns.their_turns(trainer_rows(rows), batch, KINDS[kind])
    for line in sys.stdin:
        print(json.dumps({"seconds": take(int(line))}), flush=True)


class Contestant:
    """The process of a contestant, and the time of its steps."""

    def __init__(self, kind: str, batch: int, processor_time: bool) -> None:
        words = [sys.executable, __file__, "--contestant", kind, "--batch", str(batch)]
        words += ["--processor_time"] if processor_time else []
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []

    def take(self, steps: int) -> None:
        """One turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # a library may print, too
            if line.startswith('{"seconds"'):
                self.times += json.loads(line)["seconds"]
                return
        raise SystemExit(f"a contestant ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


def main() -> None:
    """Prints one table a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processor_time", action="store_true")
    parser.add_argument("--contestant", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if args.contestant:
        take_turns(args.contestant, args.batch[0], args.processor_time)
        return
    results: list[dict[str, Any]] = []
    for batch in args.batch:
        racing = {kind: Contestant(kind, batch, args.processor_time) for kind in KINDS}
        for _ in range(args.rounds):
            for one in racing.values():
                one.take(args.steps)
        for one in racing.values():
            one.close()
        medians = {name: statistics.median(one.times) for name, one in racing.items()}
        print(f"\nbatch {batch}                    ms a step   ms a row   times tunesmith")
        for name, median in medians.items():
            ratio = median / medians["tunesmith"]
            print(f"{name:<26} {1000 * median:9.1f} {1000 * median / batch:10.2f} {ratio:12.2f}")
            results.append({"batch": batch, "name": name, "step_ms": round(1000 * median, 1), "ratio": round(ratio, 2)})
    write_record(args.output, device="cpu", results=results, note=args.note)


if __name__ == "__main__":
    main()
