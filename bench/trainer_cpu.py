"""Measure the time per training step of tunesmith's Trainer and transformers' on the CPU: all-MiniLM-L6-v2, MRPC, one process.

    .venv/bin/python bench/trainer_cpu.py [--quick] [--scripts unmodified siamese] [--batch 8 32] [--output FILE.json]

Each row is a script with one common change. The Trainers take turns, each with a new model; the first steps of a turn are not
counted. Prints the median per step and the ratio of medians, in wall-clock time and in CPU time (which other processes affect
less).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

import tunesmith
from common import write_record
from tunesmith import find_embedded

WARM_UP = 3
LENGTHS = ("input_ids", "token_type_ids", "attention_mask")


class Pooled(nn.Module):
    """A custom model: an encoder, mean pooling, and a linear layer."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.encoder, self.head = AutoModel.from_pretrained(folder), nn.Linear(384, 2)

    def embed(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        logits = self.head(self.embed(input_ids, attention_mask))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Siamese(Pooled):
    """Both sentences through one encoder, with in-batch negatives."""

    def forward(self, input_ids: Any, attention_mask: Any, other_ids: Any, other_mask: Any, labels: Any = None) -> Any:
        first, second = self.embed(input_ids, attention_mask), self.embed(other_ids, other_mask)
        scores = 20 * functional.normalize(first) @ functional.normalize(second).T
        return {"loss": functional.cross_entropy(scores, torch.arange(len(scores))), "logits": scores}


class Contrastive(Pooled):
    """The same rows twice, with different dropout, and in-batch negatives."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        first, second = self.embed(input_ids, attention_mask), self.embed(input_ids, attention_mask)
        scores = 20 * functional.normalize(first) @ functional.normalize(second).T
        return {"loss": functional.cross_entropy(scores, torch.arange(len(scores))), "logits": scores}


class Images(torch.utils.data.Dataset[Any]):
    """Random pixels."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return {"pixel_values": torch.full((3, 64, 64), index / 1000), "labels": index % 2}


class Weighted:
    """A class-weighted loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([2.0, 1.0]))
        return (loss, outputs) if return_outputs else loss


class Scripts:
    """The scripts by name: model, dataset, collator and base classes of the Trainer."""

    def __init__(self, folder: str, file: Path) -> None:
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        rows = load_dataset("parquet", data_files=str(file), split="train")
        self.rows = rows.map(
            lambda row: self.tokenizer(row["sentence1"], row["sentence2"], truncation=True), batched=True
        )
        self.sentences = rows

    def classifier(self) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=2)

    def collate(self, features: list[Any]) -> Any:
        padded = self.tokenizer.pad([{n: f[n] for n in LENGTHS} for f in features], return_tensors="pt")
        return {**padded, "labels": torch.tensor([f["label"] for f in features])}

    def collate_pairs(self, features: list[Any]) -> Any:
        first, second = (
            self.tokenizer([f[n] for f in features], padding=True, truncation=True, return_tensors="pt")
            for n in ("sentence1", "sentence2")
        )
        return {
            "input_ids": first["input_ids"],
            "attention_mask": first["attention_mask"],
            "other_ids": second["input_ids"],
            "other_mask": second["attention_mask"],
            "labels": torch.tensor([f["label"] for f in features]),
        }

    def indexed(self) -> Dataset:
        return self.rows.train_test_split(0.1, seed=0)["train"]

    def vision(self) -> Any:
        sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
        return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8))

    def make(self, script: str) -> Script:
        if script in ("class weights, collator", "class weights, accumulation"):
            steps = 2 if script.endswith("accumulation") else 1
            return Script(self.classifier(), self.rows, self.collate, (Weighted,), accumulation=steps)
        if script == "siamese":
            return Script(Siamese(self.folder), self.sentences, self.collate_pairs)
        if script == "max_length":
            collator = DataCollatorWithPadding(self.tokenizer, padding="max_length", max_length=128)
            return Script(self.classifier(), self.rows, collator)
        if script == "images":
            return Script(self.vision(), Images())
        models = {"mean pooling": Pooled, "in-batch contrastive": Contrastive}
        model = models[script](self.folder) if script in models else self.classifier()
        return Script(model, self.indexed() if script == "indexed dataset" else self.rows)


@dataclass
class Script:
    """One change of a script."""

    model: Any
    rows: Any
    collator: Any = None
    bases: tuple[type, ...] = ()
    accumulation: int = 1


NAMES = (
    "unmodified", "class weights, collator", "class weights, accumulation", "indexed dataset", "max_length", "mean pooling",
    "siamese", "in-batch contrastive", "images",
)  # fmt: skip


class Clock(TrainerCallback):  # type: ignore[misc]
    """Callback that records the time at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


def take_turn(scripts: Scripts, script: str, kind: Any, batch: int, steps: int) -> list[tuple[float, ...]]:
    """Return wall-clock and CPU seconds of each counted step."""
    made = scripts.make(script)
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output, max_steps=WARM_UP + steps, per_device_train_batch_size=batch, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=10**6, remove_unused_columns=script != "siamese",
            gradient_accumulation_steps=made.accumulation,
        )  # fmt: skip
        trainer = type("Script", (*made.bases, kind), {})(
            made.model, arguments, train_dataset=made.rows, data_collator=made.collator, callbacks=[clock],
            processing_class=None if script == "images" else scripts.tokenizer,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(clock.marks[WARM_UP - 1 :])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 4 steps")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/mrpc/train.parquet")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 4
    results: list[dict[str, Any]] = []
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    scripts = Scripts(str(find_embedded()), options.data)
    print(f"{'Script':<28}{'Batch':>6}{'transformers (ms)':>19}{'tunesmith (ms)':>16}{'Speedup':>9}{'by CPU time':>13}")
    for script in options.scripts:
        for batch in options.batch:
            seen: dict[Any, list[tuple[float, ...]]] = {transformers.Trainer: [], tunesmith.Trainer: []}
            for _ in range(options.rounds):
                for kind, found in seen.items():
                    found += take_turn(scripts, script, kind, batch, options.steps)
            theirs, ours = ([1e3 * statistics.median(t[i] for t in found) for i in (0, 1)] for found in seen.values())
            wall, processor = (round(a / b, 2) for a, b in zip(theirs, ours, strict=True))
            print(f"{script:<28}{batch:>6}{theirs[0]:>19.1f}{ours[0]:>16.1f}{wall:>8}x{processor:>12}x", flush=True)
            row = {
                "script": script,
                "batch": batch,
                "transformers_ms": round(theirs[0], 1),
                "tunesmith_ms": round(ours[0], 1),
            }
            results.append({**row, "speedup": wall, "speedup_by_cpu_time": processor})
    write_record(options.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
