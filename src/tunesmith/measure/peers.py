"""What people use today as contestants: transformers.Trainer, and the full training loop in plain PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tunesmith.data.tokens import TokenRows
from tunesmith.measure.contest import Turn
from tunesmith.measure.hardware import wait_for
from tunesmith.pipeline.prepare import Prepared

Train = Callable[[int], Turn]
SHAPES_FIRST = 12
"""Steps in which a compiled model meets its shapes."""


class RowsOfDicts(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized rows as `Dataset.map` gives them: one dict a row."""

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        taken = self.rows.take(np.array([index]))
        row: dict[str, Any] = {name: values[0].tolist() for name, values in taken.items()}
        assert self.rows.labels is not None
        return {**row, "attention_mask": [1] * len(row["input_ids"]), "labels": self.rows.labels[index].tolist()}


class _Clock(TrainerCallback):  # type: ignore[misc]  # of a library without types
    """Seconds from the end of the first step, which warms up, to the end of the last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = self.ended = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (1, state.max_steps):
            wait_for(self.device)
            self.ended = time.perf_counter()
        if state.global_step == 1:
            self.began = self.ended


class _Counting:
    """A collator that counts the rows and real tokens it was given."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.rows, self.tokens = collate, 0, 0

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.rows += len(features)
        self.tokens += sum(len(f["input_ids"]) for f in features)
        return self.collate(features)


def load_plain_model(prepared: Prepared) -> Any:
    """The same architecture and start as transformers loads it, without any of our strategies."""
    own: Any = prepared.state.model
    auto: Any = AutoModelForSequenceClassification
    try:
        model = auto.from_config(copy.deepcopy(own.config), attn_implementation="sdpa")
    except ValueError:  # a family without it, such as DeBERTa
        model = auto.from_config(copy.deepcopy(own.config), attn_implementation="eager")
    return model.to(dtype=torch.float32)


def train_trainer(
    prepared: Prepared, folder: str, *, grouped: bool, bf16: bool = False, compiled: bool = False
) -> Train:
    """One Trainer and one model; each turn is a `train()` of so many steps that continues with the weights.

    The precision is the run's own unless `bf16` asks for that. A compiled one takes some steps more before its first:
    torch.compile settles after it has seen a few shapes.
    """
    config = prepared.config
    model = load_plain_model(prepared)
    data = RowsOfDicts(prepared.rows("train"))
    turn = 0

    def train(steps: int) -> Turn:
        nonlocal turn
        turn += 1
        if compiled and turn == 1:
            train(SHAPES_FIRST)
        clock, collate = _Clock(prepared.runtime.device), _Counting(DataCollatorWithPadding(prepared.tokenizer))
        arguments = TrainingArguments(
            folder,
            max_steps=steps + 1,
            per_device_train_batch_size=config.decided.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=config.decided.learning_rate,
            lr_scheduler_type="constant",
            train_sampling_strategy="group_by_length" if grouped else "random",
            bf16=bool(config.bf16) or bf16,
            fp16=config.fp16 and not bf16,
            torch_compile=compiled,
            use_cpu=config.use_cpu,
            seed=turn,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        rows = steps * config.decided.per_device_train_batch_size * config.gradient_accumulation_steps
        # the loader collates ahead: tokens by the average row of all that it made
        return Turn(clock.ended - clock.began, rows, round(collate.tokens * rows / max(collate.rows, 1)))

    return train


def train_loop(prepared: Prepared) -> Train:
    """Forward, backward, optimizer, zero, with dynamic padding and random order: the loop that courses teach."""
    config, device = prepared.config, prepared.runtime.device
    model = load_plain_model(prepared).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.decided.learning_rate)
    collate = DataCollatorWithPadding(prepared.tokenizer)
    data = RowsOfDicts(prepared.rows("train"))
    loader = DataLoader(data, batch_size=config.decided.per_device_train_batch_size, shuffle=True, collate_fn=collate)
    batches = _forever(loader)

    def train(steps: int) -> Turn:
        rows, tokens = 0, 0
        wait_for(device)
        began = time.perf_counter()
        for _ in range(steps):
            for _ in range(config.gradient_accumulation_steps):
                batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
                with prepared.runtime.autocast():
                    loss = model(**batch).loss / config.gradient_accumulation_steps
                loss.backward()
                rows += len(batch["labels"])
                tokens += int(batch["attention_mask"].sum())
            optimizer.step()
            optimizer.zero_grad()
        wait_for(device)
        return Turn(time.perf_counter() - began, rows, tokens)

    return train


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
