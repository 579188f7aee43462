"""The same script with the import changed: our Trainer beside transformers.Trainer, on the same sequential batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from conftest import tiny_bert, token_lists
from trainer_toys import Accuracy, Recorder, Regression, RegressionDataset, arguments
from tunesmith import Trainer

STEPS = 50
BOTH = (transformers.Trainer, Trainer)
NUMBERS = (
    "loss",
    "eval_loss",
    "train_loss",
    "eval_accuracy",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "total_flos",
)


class TokenDataset(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, rows: int, seed: int = 0) -> None:
        self.data = token_lists(rows, seed)

    def __len__(self) -> int:
        return len(self.data["input_ids"])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: column[i] for name, column in self.data.items()}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(r["input_ids"]) for r in rows)
    out = {
        name: torch.tensor([list(r[name]) + [0] * (width - len(r[name])) for r in rows])
        for name in ("input_ids", "token_type_ids")
    }
    out["attention_mask"] = torch.tensor(
        [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]
    )
    return {**out, "labels": torch.tensor([r["labels"] for r in rows])}


def mean_over_window(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def bert_run(kind: Any, folder: Path, *, compute_loss_func: Any = None, **options: Any) -> Any:
    defaults = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.01, "warmup_steps": 5}
    defaults |= {"train_sampling_strategy": "sequential"}
    trainer = kind(
        tiny_bert(),
        arguments(folder, **{**defaults, **options}),
        train_dataset=TokenDataset(70),
        eval_dataset=TokenDataset(21, seed=5),
        data_collator=pad,
        compute_loss_func=compute_loss_func,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    return trainer


def compare_logs(theirs: Any, ours: Any, tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(theirs, ours, strict=True):
        assert list(a) == list(b)
        for name in NUMBERS:
            if name in a:
                assert b[name] == pytest.approx(a[name], abs=tolerance, rel=tolerance), (name, a["step"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1, "max_grad_norm": 0.5},
        {"optim": "adamw_torch", "eval_strategy": "steps", "eval_steps": 20, "logging_steps": 7, "adam_beta2": 0.98},
    ],
    ids=["plain", "accumulation", "cosine-smoothing", "evaluation"],
)
def test_losses_logs_and_weights_equal_transformers_for_50_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    loss = mean_over_window if "gradient_accumulation_steps" in options else None
    theirs = bert_run(transformers.Trainer, tmp_path / "theirs", compute_loss_func=loss, **options)
    ours = bert_run(Trainer, tmp_path / "ours", compute_loss_func=loss, **options)
    compare_logs(theirs.state.log_history, ours.state.log_history)
    losses = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    assert abs(losses[0] - losses[-1]) > 1e-3, "the run must have learned something for the comparison to mean anything"
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=0), name
    mine, their = ours.predict(TokenDataset(33, seed=2)), theirs.predict(TokenDataset(33, seed=2))
    assert np.allclose(mine.predictions, their.predictions, atol=1e-4)
    assert (mine.label_ids == their.label_ids).all()
    assert mine.metrics.keys() == their.metrics.keys()


def regression_run(kind: Any, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    recorder = Recorder()
    defaults = {"logging_steps": 3, "train_sampling_strategy": "sequential", "num_train_epochs": 2}
    trainer = kind(
        Regression(),
        arguments(folder, **{**defaults, **options}),
        train_dataset=RegressionDataset(length=70),
        eval_dataset=RegressionDataset(length=20, seed=1),
        callbacks=[recorder],
        compute_metrics=Accuracy(),
    )
    trainer.train()
    if not trainer.args.dataloader_drop_last:  # transformers leaves rows out of evaluations, too; ours never does
        trainer.evaluate()
        trainer.predict(RegressionDataset(length=21, seed=3))
    return trainer, recorder.events


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "logging_strategy": "epoch",
        },
        {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 8, "max_steps": 13},
        {
            "eval_strategy": "steps",
            "eval_steps": 9,
            "save_strategy": "steps",
            "save_steps": 9,
            "logging_first_step": True,
        },
        {"save_strategy": "best", "metric_for_best_model": "accuracy", "eval_strategy": "steps", "eval_steps": 2},
        {"eval_on_start": True, "eval_strategy": "epoch", "eval_delay": 1, "num_train_epochs": 1.5},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 3, "logging_steps": 0.2},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_callbacks_hear_the_same_events_in_the_same_order(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs, expected = regression_run(transformers.Trainer, tmp_path / "theirs", **options)
    ours, events = regression_run(Trainer, tmp_path / "ours", **options)
    assert events == expected
    assert [list(e) for e in ours.state.log_history] == [list(e) for e in theirs.state.log_history]
    assert ours.state.global_step == theirs.state.global_step
    assert ours.state.max_steps == theirs.state.max_steps
    assert ours.state.epoch == pytest.approx(theirs.state.epoch)
    assert ours.state.best_global_step == theirs.state.best_global_step
    folders = [sorted(p.name for p in (tmp_path / side).glob("checkpoint-*")) for side in ("ours", "theirs")]
    assert folders[0] == folders[1]
    for a, b in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert a["epoch"] == pytest.approx(b["epoch"])


class Asking(transformers.TrainerCallback):
    """Sets control flags at odd moments."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step in (2, 5)
        control.should_evaluate = state.global_step == 4
        control.should_save = state.global_step == 5
        control.should_epoch_stop = state.global_step == 6
        control.should_training_stop = state.global_step == 11


def test_control_flags_set_by_a_callback_do_the_same(tmp_path: Path) -> None:
    runs = []
    for kind in BOTH:
        recorder = Recorder()
        trainer = kind(
            Regression(),
            arguments(tmp_path / kind.__module__, num_train_epochs=3, logging_steps=100),
            train_dataset=RegressionDataset(length=70),
            eval_dataset=RegressionDataset(length=20, seed=1),
            callbacks=[Asking(), recorder],
        )
        trainer.train()
        runs.append((recorder.events, trainer.state.global_step, trainer.state.epoch))
    assert runs[0] == runs[1]
    assert runs[1][1] == 11
