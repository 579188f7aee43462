"""Plain transformers.Trainer with our callback: its run reads like one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tunesmith.diagnosis.verdict import diagnose
from tunesmith.runs.curves import load_curves
from tunesmith.runs.event_log import read_journal
from tunesmith.trainer.journal_callback import JournalCallback


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Eight tokens a row; the first token tells the label."""

    def __init__(self, n: int) -> None:
        pick = torch.Generator().manual_seed(n)
        self.ids = torch.randint(5, 50, (n, 8), generator=pick)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {
            "input_ids": self.ids[k],
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": int(self.ids[k, 0] > 27),
        }


def make_trainer(folder: Path, *, epochs: int = 3, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    args = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        metric_for_best_model="loss",
        learning_rate=3e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=Rows(64),
        eval_dataset=Rows(40),
        callbacks=[JournalCallback()],
    )


def test_a_run_of_plain_transformers_gets_curves_and_a_diagnosis(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    curves = load_curves(tmp_path)
    logged = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert curves.train_loss.value.tolist() == pytest.approx(logged)
    assert curves.metric("validation", "loss").step.tolist() == [4, 8, 12]
    assert curves.rows == {"validation": 40}
    assert (curves.ended, curves.num_steps, curves.steps_per_epoch, curves.train_rows) == ("completed", 12, 4.0, 64)
    assert curves.tracked_metric == "loss"
    assert diagnose(curves, {"learning_rate": 3e-3}, num_labels=2)

    resumed = make_trainer(tmp_path, epochs=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    again = load_curves(tmp_path)
    assert again.train_loss.step.tolist() == list(range(1, 13))
    assert again.resumed_at == (8,)


def test_a_loss_that_transformers_hides_is_a_gap(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1)
    callback = JournalCallback()
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.state.global_step = 1
    callback.on_log(
        trainer.args, trainer.state, trainer.control, logs={"loss": 0.0, "grad_norm": float("nan"), "epoch": 0.1}
    )
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert [type(e).__name__ for e in read_journal(tmp_path / "journal.jsonl")][1:3] == ["StepDone", "NonFinite"]
    assert load_curves(tmp_path).non_finite == (1,)
    assert load_curves(tmp_path).train_loss.finite().value.tolist() == []
