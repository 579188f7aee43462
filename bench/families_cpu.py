"""This library's Trainer beside transformers.Trainer on the CPU, family by family: small shapes, random weights, MRPC's ids.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/families_cpu.py [--shapes ...] [--batch 8 32] [--rounds 2] [--steps 5] [--output FILE.json]

6 layers of 384, fp32, dropout on, random order. The contestants take turns, each with a fresh model; a turn's first steps are
not counted. Two medians a step: processor time, which other processes on the machine change little, and the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from families_gpu import DEBERTA
from records import write_record
from token_files import arrow_rows, collator, engine_rows

SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("modernbert", SMALL | {"intermediate_size": 576, "classifier_pooling": "mean"}),
    "deberta-v3": ("deberta-v2", SMALL | DEBERTA | {"layer_norm_eps": 1e-7}),
    "mpnet": ("mpnet", SMALL | {"vocab_size": 30527}),
}
WARM_UP = 3
"""The first step compares each speed-up with the plain step."""


def take_turn(kind: Any, shape: str, rows: Any, batch: int, steps: int) -> list[tuple[float, float]]:
    """Processor seconds and seconds of each step that counts."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, PrinterCallback, TrainerCallback

    name, sizes = SHAPES[shape]
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(name, num_labels=2, **sizes))
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append((time.process_time(), time.perf_counter()))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=WARM_UP + steps, per_device_train_batch_size=batch, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=10**6,
        )  # fmt: skip
        trainer = kind(model, arguments, train_dataset=rows, data_collator=collator(), callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    kept = marks[WARM_UP - 1 :]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(kept)]


def main() -> None:
    """Prints a line for each shape and batch size."""
    from tunesmith import Trainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows = arrow_rows(engine_rows("mrpc", "train", 600))
    results: list[dict[str, Any]] = []
    for batch in args.batch:
        for shape in args.shapes:
            times: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
            for _ in range(args.rounds):
                for name, kind in (("ours", Trainer), ("theirs", transformers.Trainer)):
                    times[name] += take_turn(kind, shape, rows, batch, args.steps)
            one: dict[str, Any] = {"shape": shape, "batch": batch}
            for name, taken in times.items():
                one[f"{name}_processor_ms"] = round(1e3 * statistics.median(t[0] for t in taken), 1)
                one[f"{name}_ms"] = round(1e3 * statistics.median(t[1] for t in taken), 1)
            one["ratio"] = round(one["theirs_processor_ms"] / one["ours_processor_ms"], 2)
            print(one, flush=True)
            results.append(one)
    write_record(args.output, device="cpu", results=results, note=args.note)


if __name__ == "__main__":
    main()
