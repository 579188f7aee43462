"""With equal weights, seed and batches and without dropout, losses match transformers.Trainer.

With accumulation, transformers uses `compute_loss_func`, the documented way to divide by the items of the whole step.
Without it, transformers 5.22 adds up the micro-batch means of a BERT classifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import Task
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

ROWS, STEPS = 70, 50


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(f["input_ids"]) for f in features)
    names = ("input_ids", "token_type_ids", "attention_mask")
    out = {n: torch.tensor([f[n] + [0] * (width - len(f[n])) for f in features]) for n in names}
    out["labels"] = torch.tensor([f["labels"] for f in features])
    return out


def mean_over_window(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def oracle_losses(folder: Path, model: Any, *, batch: int, accumulation: int, loss: Any) -> list[float]:
    data = token_lists(ROWS)
    rows = [
        {"input_ids": i, "token_type_ids": t, "attention_mask": [1] * len(i), "labels": y}
        for i, t, y in zip(data["input_ids"], data["token_type_ids"], data["labels"], strict=True)
    ]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=5,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=pad, compute_loss_func=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def our_losses(model: Any, *, batch: int, accumulation: int) -> list[float]:
    rows = TokenRows.from_lists(token_lists(ROWS))
    batches = Batches(rows, Padding(), batch, seed=7, accumulation=accumulation, sampling="sequential")
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=STEPS, num_epochs=3)
    plan = Plan(steps, ends, Schedule("linear", 1e-3, 5, steps), seed=7)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.01)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True))
    events = list(train_events(state, batches, plan))
    return [e.loss for e in events if isinstance(e, StepDone) and e.loss is not None]


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4), (3, 4)])
def test_losses_and_weights_match_transformers_for_50_steps(tmp_path: Path, batch: int, accumulation: int) -> None:
    """With 70 rows, every epoch ends with a partial step and a partial micro-batch."""
    theirs_model, ours_model = tiny_bert(), tiny_bert()
    loss = None if accumulation == 1 else mean_over_window
    theirs = oracle_losses(tmp_path, theirs_model, batch=batch, accumulation=accumulation, loss=loss)
    ours = our_losses(ours_model, batch=batch, accumulation=accumulation)
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    assert abs(ours[0] - ours[-1]) > 1e-3, "the run must have learned something for the comparison to mean anything"
    for (name, a), b in zip(ours_model.named_parameters(), theirs_model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=0), name
