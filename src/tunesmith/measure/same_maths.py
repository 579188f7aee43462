"""Do we and the Trainer train the same thing? The same rows in the same order, dropout off: the losses side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

from tunesmith.events import StepDone
from tunesmith.measure.peers import RowsOfDicts, load_plain_model
from tunesmith.pipeline.prepare import Prepared
from tunesmith.training.checkpoint import full_weights
from tunesmith.training.loop import train_events
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for


def compare_losses(prepared: Prepared, folder: str, *, steps: int) -> list[tuple[float, float]]:
    """(our loss, theirs) of each step. The prepared run is used up by it."""
    config = prepared.config
    size = config.decided.per_device_train_batch_size
    rows = prepared.rows("train").select(np.arange(min(steps * size, len(prepared.rows("train")))))
    plain = load_plain_model(prepared)
    plain.load_state_dict(full_weights(prepared.state))
    without_dropout(prepared.state.model)
    without_dropout(plain)
    ours = _ours(prepared, rows, size)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=size,
        learning_rate=config.decided.learning_rate,
        weight_decay=config.decided.weight_decay,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        bf16=prepared.runtime.precision == "bf16",
        fp16=config.fp16,
        use_cpu=config.use_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collate = DataCollatorWithPadding(prepared.tokenizer)
    trainer = Trainer(plain, arguments, train_dataset=RowsOfDicts(rows), data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return list(zip(ours, theirs, strict=True))


def _ours(prepared: Prepared, rows: Any, size: int) -> list[float]:
    config = prepared.config
    batches = replace(prepared.batches, rows=rows, sampling="sequential", accumulation=1, token_budget=None)
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=0, num_epochs=1)
    schedule = Schedule("constant", config.decided.learning_rate, 0, steps)
    plan = Plan(steps, ends, schedule, seed=config.seed, max_grad_norm=config.max_grad_norm)
    events = train_events(prepared.state, batches, plan)
    return [float("nan") if e.loss is None else e.loss for e in events if isinstance(e, StepDone)]


def without_dropout(model: Any) -> None:
    """Switches every dropout of the model off: modules, and the numbers that attention reads."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    for name in [n for n, v in vars(model.config).items() if "dropout" in n and isinstance(v, float)]:
        setattr(model.config, name, 0.0)
