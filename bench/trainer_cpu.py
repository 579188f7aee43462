"""Time per training step of our Trainer and transformers' on the CPU: all-MiniLM-L6-v2, MRPC, both in one process.

    .venv/bin/python bench/trainer_cpu.py [--batch 8 32] [--rounds 3] [--steps 8]

The Trainers take turns, each with a fresh model; the first steps of a turn are not counted. Prints the median per step, in
wall-clock time and in processor time (other processes on the machine change the latter little).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback, TrainerCallback

import tunesmith
from tunesmith import find_embedded

WARM_UP = 3
SCRIPTS = ("unmodified", "collator and class weights")


def read_rows(tokenizer: Any, file: Path, *, indexed: bool) -> Dataset:
    """Return MRPC's training pairs as token ids; `indexed` as after `train_test_split()`."""
    rows = load_dataset("parquet", data_files=str(file), split="train")
    rows = rows.map(lambda row: tokenizer(row["sentence1"], row["sentence2"], truncation=True), batched=True)
    return rows.train_test_split(0.1, seed=0)["train"] if indexed else rows


def customized(kind: Any) -> Any:
    """Return a Trainer with a class-weighted loss."""

    class Weighted(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([2.0, 1.0]))
            return (loss, outputs) if return_outputs else loss

    return Weighted


def take_turn(
    kind: Any, script: str, folder: str, rows: Any, tokenizer: Any, batch: int, steps: int
) -> list[tuple[float, ...]]:
    """Return (seconds, processor seconds) of each step that counts."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    def collate(features: list[Any]) -> Any:
        names = ("input_ids", "token_type_ids", "attention_mask")
        padded = tokenizer.pad([{n: f[n] for n in names} for f in features], return_tensors="pt")
        return {**padded, "labels": torch.tensor([f["label"] for f in features])}

    own = script != "unmodified"
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output, max_steps=WARM_UP + steps, per_device_train_batch_size=batch, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=10**6,
        )  # fmt: skip
        trainer = (customized(kind) if own else kind)(
            model, arguments, train_dataset=rows, processing_class=tokenizer, data_collator=collate if own else None,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(marks[WARM_UP - 1 :])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/mrpc/train.parquet")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = str(find_embedded())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(f"{'Script':<28}{'Batch':>6}{'transformers (ms)':>19}{'tunesmith (ms)':>16}{'Speedup':>9}{'by CPU time':>13}")
    for script in SCRIPTS:
        rows = read_rows(tokenizer, options.data, indexed=script != "unmodified")
        for batch in options.batch:
            seen: dict[Any, list[tuple[float, ...]]] = {transformers.Trainer: [], tunesmith.Trainer: []}
            for _ in range(options.rounds):
                for kind, found in seen.items():
                    found += take_turn(kind, script, folder, rows, tokenizer, batch, options.steps)
            theirs, ours = ([1e3 * statistics.median(t[i] for t in found) for i in (0, 1)] for found in seen.values())
            ratios = f"{theirs[0] / ours[0]:>8.2f}x{theirs[1] / ours[1]:>12.2f}x"
            print(f"{script:<28}{batch:>6}{theirs[0]:>19.1f}{ours[0]:>16.1f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
