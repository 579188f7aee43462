"""Step time of the whole engine beside transformers.Trainer on this machine: same model, same rows, taking turns.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/engine_cpu.py [--batch 8 32] [--rounds 5] [--steps 12]

all-MiniLM-L6-v2, MRPC, fp32, dropout on. Three contestants run `--steps` steps each, in turn, `--rounds` times:
tunesmith as it is by default, the Trainer's defaults (random order), the Trainer with group_by_length. Printed: the
median time of a step and of a row, and the ratio to tunesmith. A turn's first two steps warm up and are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from token_files import TOKENS, engine_rows, pad, trainer_rows

WARM_UP = 2


def our_turns(batch: int) -> Callable[[int], list[float]]:
    """A function that trains some steps and gives their times."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.events import Event, SafePoint
    from tunesmith.labels import LabelMap
    from tunesmith.model.load import load_model
    from tunesmith.train.loop import train_events
    from tunesmith.train.losses import TaskLoss
    from tunesmith.train.optim import make_optimizer
    from tunesmith.train.plan import Plan, epoch_ends_for
    from tunesmith.train.runtime import make_runtime
    from tunesmith.train.schedule import Schedule
    from tunesmith.train.state import TrainState
    from tunesmith.train.strategies import choose_strategies

    rows, runtime = engine_rows("mrpc", "train"), make_runtime()
    labels = LabelMap.for_classes(["0", "1"])
    model = load_model(TOKENS / "minilm", labels).model.to(runtime.device)
    strategies = choose_strategies(model, rows, Padding(), device=runtime.device)
    batches = Batches(rows, strategies.train_collate, batch, seed=1, sampling="group_by_length")
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=10**6, num_epochs=1)
    optimizer = make_optimizer(model, learning_rate=5e-5)
    state = TrainState(model, optimizer, TaskLoss(labels.task, 2), runtime, cut=strategies.cut)
    events: Iterator[Event] = train_events(
        state, batches, Plan(steps, ends, Schedule("constant", 5e-5, 0, steps), seed=1)
    )

    def take(count: int) -> list[float]:
        times, last = [], time.perf_counter()
        while len(times) < count:
            if isinstance(next(events), SafePoint):
                now = time.perf_counter()
                times.append(now - last)
                last = now
        return times

    return take


def their_turns(batch: int, sampling: str) -> Callable[[int], list[float]]:
    """The same with transformers.Trainer: a fresh Trainer a turn on one model; its start-up is not counted."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    model = AutoModelForSequenceClassification.from_pretrained(str(TOKENS / "minilm"), num_labels=2, dtype="float32")
    rows = trainer_rows(engine_rows("mrpc", "train"))

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.last = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            self.times.append(now - self.last)
            self.last = now

    turn = 0

    def take(count: int) -> list[float]:
        nonlocal turn
        turn += 1
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=count,
                per_device_train_batch_size=batch,
                train_sampling_strategy=sampling,
                lr_scheduler_type="constant",
                seed=turn,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            Trainer(model, arguments, train_dataset=rows, data_collator=pad, callbacks=[clock]).train()
        return clock.times

    return take


def main() -> None:
    """Prints one table a batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds of {args.steps} steps")
    for batch in args.batch:
        turns = {
            "tunesmith": our_turns(batch),
            "Trainer, defaults": their_turns(batch, "random"),
            "Trainer, group_by_length": their_turns(batch, "group_by_length"),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(args.rounds):
            for name, take in turns.items():
                times[name] += take(args.steps + WARM_UP)[WARM_UP:]
        medians = {name: statistics.median(t) for name, t in times.items()}
        print(f"\nbatch {batch}                    ms a step   ms a row   times tunesmith")
        for name, median in medians.items():
            print(
                f"{name:<26} {1000 * median:9.1f} {1000 * median / batch:10.2f} {median / medians['tunesmith']:12.2f}"
            )


if __name__ == "__main__":
    main()
