"""Rows 10 to 19 of the course: the Trainer, a manual loop, Accelerate, and curves, on part of MRPC."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from small_embedded import shrink
from tunesmith import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    finetune,
    get_scheduler,
    load_curves,
    load_metric,
    set_seed,
)

pytestmark = pytest.mark.slow
QUIET: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}


def compute_metrics(eval_preds: Any) -> dict[str, Any]:
    logits, labels = eval_preds
    return load_metric("glue", "mrpc").compute(predictions=np.argmax(logits, axis=-1), references=labels)


def make_model(checkpoint: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    set_seed(42)
    return AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)


@pytest.fixture(scope="module")
def small(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small model with the checkpoint's vocabulary; the tests don't depend on its size."""
    return str(shrink(Path(checkpoint), tmp_path_factory.mktemp("small") / "model"))


@pytest.fixture(scope="module")
def some(tokenized_datasets: Any) -> dict[str, Any]:
    """Return 64 training examples and the full validation split."""
    return {"train": tokenized_datasets["train"].select(range(64)), "validation": tokenized_datasets["validation"]}


@pytest.fixture(scope="module")
def trainer(small: str, tokenizer: Any, some: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the Trainer of row 10 of the course: model and arguments by position."""
    folder = tmp_path_factory.mktemp("course") / "test-trainer"
    training_args = TrainingArguments(str(folder), eval_strategy="epoch", num_train_epochs=2, **QUIET)
    made = Trainer(
        make_model(small),
        training_args,
        train_dataset=some["train"],
        eval_dataset=some["validation"],
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    made.train()
    return made


def test_row_10_trainer_trains_and_drops_text_columns(trainer: Any) -> None:
    assert trainer.state.global_step == 16
    assert trainer.args.logging_steps == 500
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_row_10_older_argument_names_work_with_a_note(small: str, tokenizer: Any, some: Any, tmp_path: Path) -> None:
    training_args = TrainingArguments(str(tmp_path), evaluation_strategy="epoch", max_steps=1, **QUIET)
    old = Trainer(
        make_model(small),
        training_args,
        train_dataset=some["train"],
        eval_dataset=some["validation"].select(range(8)),
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        tokenizer=tokenizer,
    )
    assert old.processing_class is tokenizer
    old.train()
    assert any("eval_loss" in entry for entry in old.state.log_history)


def test_row_11_predict_returns_named_tuple_of_408_rows(trainer: Any, some: Any) -> None:
    predictions = trainer.predict(some["validation"])
    assert predictions.predictions.shape == (408, 2)
    assert predictions.label_ids.shape == (408,)
    assert predictions.label_ids.tolist() == some["validation"]["label"][:]
    assert np.argmax(predictions.predictions, axis=-1).shape == (408,)
    assert set(predictions.metrics) >= {"test_loss", "test_accuracy", "test_f1"}


def test_row_12_accuracy_and_f1_are_logged_every_epoch(trainer: Any) -> None:
    evaluations = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    assert [entry["epoch"] for entry in evaluations] == [1.0, 2.0]
    assert all(0 < entry["eval_f1"] <= 1 and entry["eval_loss"] > 0 for entry in evaluations)


def test_row_13_fp16_without_gpu_is_explained(
    small: str, some: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    args = TrainingArguments(str(tmp_path), fp16=True, **QUIET)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING", logger="transformers.trainer"):
        Trainer(make_model(small), args, train_dataset=some["train"])
    assert "fp16=True has no effect on a CPU: training runs in float32" in caplog.text


def test_row_13_gradient_accumulation_is_applied(small: str, tokenizer: Any, some: Any, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), gradient_accumulation_steps=4, num_train_epochs=1, save_strategy="no", **QUIET
    )
    made = Trainer(
        make_model(small), args, train_dataset=some["train"], data_collator=DataCollatorWithPadding(tokenizer)
    )
    assert made.train().global_step == 2


@pytest.fixture(scope="module")
def loaders(tokenized_datasets: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the two loaders of row 14, with columns removed and renamed by hand."""
    tidy = tokenized_datasets.remove_columns(["sentence1", "sentence2", "idx"])
    tidy = tidy.rename_column("label", "labels")
    tidy.set_format("torch")
    collate = DataCollatorWithPadding(tokenizer)
    train = DataLoader(tidy["train"], shuffle=True, batch_size=8, collate_fn=collate)
    return train, DataLoader(tidy["validation"], batch_size=8, collate_fn=collate)


def test_row_14_one_batch_and_one_forward_pass(loaders: Any, small: str) -> None:
    set_seed(0)
    batch = next(iter(loaders[0]))
    assert batch["labels"].shape == (8,)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
    assert batch["input_ids"].shape[0] == 8
    outputs = make_model(small)(**batch)
    assert 0.4 < outputs.loss.item() < 1.1
    assert outputs.logits.shape == (8, 2)


def test_row_15_learning_rate_falls_linearly_over_1377_steps(loaders: Any) -> None:
    from tunesmith import Schedule, lr_at

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5e-5)
    steps = 3 * len(loaders[0])
    assert steps == 1377
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=steps)
    ours = Schedule("linear", 5e-5, 0, steps)
    for step in range(steps):
        assert scheduler.get_last_lr()[0] == pytest.approx(5e-5 * (1 - step / steps), abs=1e-18)
        assert lr_at(step, ours) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-18)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.0]


def test_rows_16_and_17_manual_loop_scores_like_trainer(
    loaders: Any, small: str, tokenizer: Any, some: Any, tmp_path: Path
) -> None:
    from tqdm.auto import tqdm

    model = make_model(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=6)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model.to(device).train()
    bar = tqdm(range(6), disable=True)
    for _, batch in zip(range(6), loaders[0], strict=False):
        batch = {k: v.to(device) for k, v in batch.items()}
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.update(1)
    metric = load_metric("glue", "mrpc")
    model.eval()
    for batch in loaders[1]:
        with torch.no_grad():
            logits = model(**{k: v.to(device) for k, v in batch.items()}).logits
        metric.add_batch(predictions=torch.argmax(logits, dim=-1), references=batch["labels"])
    by_hand = metric.compute()
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **QUIET),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    by_trainer = trainer.evaluate(some["validation"])
    assert by_hand["accuracy"] == pytest.approx(by_trainer["eval_accuracy"])
    assert by_hand["f1"] == pytest.approx(by_trainer["eval_f1"])


def test_row_18_accelerate_loop_counts_every_row_once(loaders: Any, small: str) -> None:
    """Runs in one process; docs/course/07_accelerate.md and tests/distributed use two."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    train_dl, eval_dl, model, optimizer = accelerator.prepare(*loaders, model, optimizer)
    model.train()
    for _, batch in zip(range(2), train_dl, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    rows = 0
    for batch in eval_dl:
        rows += len(accelerator.gather_for_metrics(batch["labels"]))
    assert rows == 408


def test_rows_19_and_21_curves_are_drawn_and_best_model_kept(raw_datasets: Any, small: str, tmp_path: Path) -> None:
    """Train in one call, then plot curves by step and epoch for both splits."""
    result = finetune(
        train_data=raw_datasets["train"].select(range(64)),
        validation_data=raw_datasets["validation"].select(range(48)),
        model_name_or_path=small,
        output_dir=str(tmp_path / "run"),
        num_train_epochs=6,
        learning_rate=5e-4,
        early_stopping_patience=1,
        use_cpu=True,
        cache_dir=str(tmp_path / "cache"),
    )
    assert result.best_step is not None
    curves = load_curves(result.run.path)
    assert len(curves.train_loss) == result.steps
    for split in ("validation", "train_sample"):
        assert len(curves.metric(split, "loss")) == len(curves.metric(split, "accuracy")) > 0
    assert result.run.curves_png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in result.run.curves_svg.read_text()
    best = curves.best()
    assert best is not None
    assert best[1] == result.best_step


def test_row_21_early_stopping_callback_loads_best_model(small: str, tokenizer: Any, some: Any, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=12,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, learning_rate=1e-2, **QUIET,
    )  # fmt: skip
    made = Trainer(
        make_model(small),
        args,
        train_dataset=some["train"],
        eval_dataset=some["validation"].select(range(40)),
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    made.train()
    assert made.state.global_step < 12
    assert made.state.best_model_checkpoint is not None
    assert made.state.best_global_step == made.state.global_step - 2
