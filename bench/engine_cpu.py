"""Time per training step on a CPU: the training loop of `tunesmith train` compared with transformers.Trainer.

    .venv/bin/python bench/common.py
    .venv/bin/python bench/engine_cpu.py [--batch 8 32] [--rounds 5] [--steps 12] [--output FILE.json]

all-MiniLM-L6-v2, MRPC, float32, dropout on. Three processes take turns with `--steps` steps, `--rounds` times: tunesmith,
Trainer with its defaults (random order), and Trainer with group_by_length. Prints the median time per step. The first two
steps of a turn are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import TOKENS, engine_rows, pad, trainer_rows, write_record

KINDS = {"tunesmith": "", "Trainer, defaults": "random", "Trainer, group_by_length": "group_by_length"}
WARM_UP = 2
Turn = Callable[[int], list[float]]
"""A function that trains some steps and returns the seconds of each."""


def make_model() -> Any:
    """Return all-MiniLM-L6-v2 with a new head."""
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(str(TOKENS / "minilm"), num_labels=2, dtype="float32")


def our_turns(batch: int) -> Turn:
    """Set up the training loop as `tunesmith train` does."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.events import SafePoint
    from tunesmith.labels import Task
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
    from tunesmith.training.state import TrainState

    rows, runtime, model = engine_rows("mrpc", "train"), make_runtime(use_cpu=True), make_model()
    speedups = apply_speedups(model, rows, Padding(), device=runtime.device, precision="no")
    batches = Batches(rows, speedups.train_collate, batch, 1, sampling=speedups.best_order(runtime.device))
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=10**7, num_epochs=1)
    optimizer = make_optimizer(model, learning_rate=5e-5)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), runtime, speedups=speedups, only_writer=True)
    events = train_events(state, batches, Plan(steps, ends, Schedule("constant", 5e-5, 0, steps), seed=1))

    def take(count: int) -> list[float]:
        times = []
        while len(times) < WARM_UP + count:
            if isinstance(next(events), SafePoint):
                times.append(time.perf_counter())
        return [b - a for a, b in zip(times[WARM_UP - 1 :], times[WARM_UP:], strict=False)]

    return take


def their_turns(batch: int, sampling: str) -> Turn:
    """Set up transformers.Trainer: a new one per turn on the same model; its start-up is not counted."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    rows, model = trainer_rows(engine_rows("mrpc", "train")), make_model()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times.append(time.perf_counter())

    def take(count: int) -> list[float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=count + WARM_UP,
                per_device_train_batch_size=batch,
                train_sampling_strategy=sampling,
                lr_scheduler_type="constant",
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = Trainer(model, arguments, train_dataset=rows, data_collator=pad, callbacks=[clock])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return [b - a for a, b in zip(clock.times[WARM_UP - 1 :], clock.times[WARM_UP:], strict=False)]

    return take


def work(kind: str, batch: int) -> None:
    """Run in a child process: for each line with a number of steps, print a line with their seconds."""
    take = our_turns(batch) if kind == "tunesmith" else their_turns(batch, KINDS[kind])
    for line in sys.stdin:
        print(json.dumps({"seconds": take(int(line))}), flush=True)


def ask(process: subprocess.Popen[str], steps: int) -> list[float]:
    """Run one turn of a child process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    for line in process.stdout:  # a library may print, too
        if line.startswith('{"seconds"'):
            return list(json.loads(line)["seconds"])
    raise SystemExit(f"a process ended with exit code {process.wait()}")


def main() -> None:
    """Print one table per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.batch[0])
        return
    results: list[dict[str, Any]] = []
    for batch in args.batch:
        processes = {
            kind: subprocess.Popen(
                [sys.executable, __file__, "--work", kind, "--batch", str(batch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind in KINDS
        }
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for kind, process in processes.items():
                times[kind] += ask(process, args.steps)
        for process in processes.values():
            process.communicate()
        medians = {kind: statistics.median(some) for kind, some in times.items()}
        print(f"\nBatch {batch:<20} Time per step (ms)   Relative time")
        for kind, median in medians.items():
            ratio = median / medians["tunesmith"]
            print(f"{kind:<26} {1000 * median:18.1f} {ratio:15.2f}")
            results.append({"batch": batch, "name": kind, "step_ms": round(1000 * median, 1), "ratio": round(ratio, 2)})
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
