"""Training with Trainer: loaders, optimizers, schedulers, overrides, streams, precision, NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback

from conftest import tiny_bert, token_lists
from trainer_toys import Accuracy, Recorder, Regression, RegressionDataset, Stream, arguments
from tunesmith import Trainer
from tunesmith.errors import ConfigError, NumericsError
from tunesmith.events import RunEnded
from tunesmith.runs.event_log import read_journal


def make(folder: Path, *, model: Any = None, kind: Any = Trainer, data: Any = None, **options: Any) -> Any:
    own = {
        n: options.pop(n)
        for n in ("optimizers", "callbacks", "compute_loss_func", "model_init", "data_collator")
        if n in options
    }
    return kind(
        None if "model_init" in own else (Regression() if model is None else model),
        arguments(folder, **options),
        train_dataset=RegressionDataset() if data is None else data,
        eval_dataset=RegressionDataset(length=20, seed=1),
        compute_metrics=Accuracy(),
        **own,
    )


def test_training_equals_transformers_and_repeats_with_the_same_seed(tmp_path: Path) -> None:
    first, second = make(tmp_path / "1"), make(tmp_path / "2")
    oracle = make(tmp_path / "oracle", kind=transformers.Trainer)
    output = first.train()
    second.train()
    oracle.train()
    assert output.global_step == 24
    assert first.model.a.item() == pytest.approx(oracle.model.a.item(), abs=1e-6)
    assert torch.equal(first.model.a, second.model.a)
    other = make(tmp_path / "3", seed=314)
    other.train()
    assert not torch.equal(first.model.a, other.model.a)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_does_not_depend_on_workers(tmp_path: Path, workers: int) -> None:
    plain, other = make(tmp_path / "1"), make(tmp_path / "2", dataloader_num_workers=workers)
    plain.train()
    other.train()
    assert torch.equal(plain.model.a, other.model.a)


def test_data_seed_alone_changes_the_order(tmp_path: Path) -> None:
    runs = [make(tmp_path / str(seed), data_seed=seed) for seed in (None, 42, 7)]
    for run in runs:
        run.train()
    assert torch.equal(runs[0].model.a, runs[1].model.a)
    assert not torch.equal(runs[0].model.a, runs[2].model.a)


def test_accumulation_equals_the_large_batch(tmp_path: Path) -> None:
    small = make(tmp_path / "1", gradient_accumulation_steps=2, per_device_train_batch_size=4)
    large = make(tmp_path / "2")
    small.train()
    large.train()
    assert small.model.a.item() == pytest.approx(large.model.a.item(), abs=1e-6)


def test_stream_is_read_again_until_max_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make(tmp_path / "1", data=Stream(24), max_steps=8, callbacks=[recorder])
    assert trainer.train().global_step == 8
    assert recorder.events.count("on_epoch_begin") == 3


def test_a_users_train_loader_sampler_and_collator_are_used(tmp_path: Path) -> None:
    seen: list[int] = []

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=16, collate_fn=self.data_collator)

    class OwnSampler(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len(rows))
        return {n: torch.tensor(np.array([r[n] for r in rows])) for n in rows[0]}

    assert make(tmp_path / "1", kind=Own, num_train_epochs=1, data_collator=collate).train().global_step == 4
    assert seen == [16] * 4
    own, plain = make(tmp_path / "2", kind=OwnSampler), make(tmp_path / "3", train_sampling_strategy="sequential")
    own.train()
    plain.train()
    assert torch.equal(own.model.a, plain.model.a)


def test_training_step_may_be_wrapped_or_replaced(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Wrapped(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            calls.append(int(num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    class Replaced(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    runs = [make(tmp_path / k.__name__, kind=k, gradient_accumulation_steps=2) for k in (Trainer, Wrapped, Replaced)]
    outputs = [run.train() for run in runs]
    assert len(calls) == 24
    assert set(calls) == {16}
    assert torch.equal(runs[0].model.a, runs[1].model.a)
    assert runs[2].model.a.item() == pytest.approx(runs[0].model.a.item(), abs=1e-6)
    assert outputs[2].training_loss == pytest.approx(outputs[0].training_loss, rel=1e-5)


def test_model_init_gives_each_run_a_fresh_model(tmp_path: Path) -> None:
    trainer = make(tmp_path, model_init=lambda: Regression(a=0.5))
    trainer.train()
    first = trainer.model.a.item()
    trainer.train()
    assert trainer.model.a.item() == first
    with pytest.raises(RuntimeError, match="model_init"):
        Trainer(model_init=Regression, args=arguments(tmp_path), optimizers=(object(), None))
    with pytest.raises(RuntimeError, match="requires either"):
        Trainer(args=arguments(tmp_path))
    with pytest.raises(ValueError, match="not both"):
        Trainer(Regression(), arguments(tmp_path), model_init=Regression)


def test_a_loss_that_is_not_finite_stops_the_run_and_the_weights_stay(tmp_path: Path) -> None:
    class Broken(Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            self.calls += 1
            loss = super().compute_loss(model, inputs, **kwargs)
            return loss * float("nan") if self.calls >= 4 else loss

    trainer = make(tmp_path, kind=Broken, logging_steps=1, save_strategy="steps", save_steps=2)
    with pytest.raises(NumericsError, match=r"step 4: loss.*last good checkpoint: checkpoint-2\. Lower learning_rate"):
        trainer.train()
    assert math.isfinite(trainer.model.a.item())
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e][-1] > 0
    assert [e.reason for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e, RunEnded)] == ["NumericsError"]


def test_bf16_trains_on_a_cpu(tmp_path: Path) -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def forward(self, input_x: torch.Tensor, labels: Any = None) -> Any:
            kinds.add(self.line(input_x[:, None]).dtype)
            y = self.line(input_x[:, None])[:, 0].float()
            return (y,) if labels is None else (torch.nn.functional.mse_loss(y, labels), y)

    kinds: set[Any] = set()
    make(tmp_path, model=Half(), bf16=True, max_steps=2).train()
    assert kinds == {torch.bfloat16}


def test_group_by_length_trains_on_every_row(tmp_path: Path) -> None:
    data = token_lists(200)
    rows = [{n: c[i] for n, c in data.items()} for i in range(200)]
    widths: list[int] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(r["input_ids"]) for r in batch)
        widths.append(width - min(len(r["input_ids"]) for r in batch))
        ids = [r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in batch]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor([r["labels"] for r in batch])}

    options: dict[str, Any] = {"model": tiny_bert(), "data": rows, "num_train_epochs": 1, "data_collator": collate}
    make(tmp_path / "1", train_sampling_strategy="group_by_length", **options).train()
    grouped = sum(widths)
    widths.clear()
    make(tmp_path / "2", **options).train()
    assert grouped < sum(widths)


def test_neftune_gradient_checkpointing_and_determinism_are_taken(tmp_path: Path) -> None:
    data = token_lists(16, longest=6)
    rows = [
        {"input_ids": (r + [0] * 8)[:8], "labels": y} for r, y in zip(data["input_ids"], data["labels"], strict=True)
    ]
    plain = make(tmp_path / "1", model=tiny_bert(), data=rows, max_steps=2)
    plain.train()
    noisy = make(tmp_path / "2", model=tiny_bert(), data=rows, max_steps=2, neftune_noise_alpha=5.0)
    noisy.train()
    saved = make(tmp_path / "3", model=tiny_bert(), data=rows, max_steps=2, gradient_checkpointing=True)
    saved.train()
    first = [next(iter(t.model.parameters())) for t in (plain, noisy, saved)]
    assert not torch.equal(first[0], first[1])
    assert torch.allclose(first[0], first[2], atol=1e-6)
    assert not noisy.model.get_input_embeddings()._forward_hooks


def test_training_step_may_be_called_by_hand_before_any_run(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    inputs = {"input_x": torch.tensor([1.0, 2.0]), "labels": torch.tensor([1.0, 3.0])}
    loss = trainer.training_step(trainer.model, dict(inputs), 2)
    predicted = trainer.prediction_step(trainer.model, dict(inputs), prediction_loss_only=True)[0]
    assert torch.equal(loss, predicted)
    assert loss.item() == pytest.approx(5.0)
    assert trainer.model.a.grad is not None


def test_log_level_lets_the_start_of_the_run_be_seen(tmp_path: Path) -> None:
    from transformers.testing_utils import CaptureLogger
    from transformers.utils import logging

    before = logging.get_verbosity()
    try:
        with CaptureLogger(logging.get_logger()) as seen:
            make(tmp_path / "1", max_steps=1, log_level="info").train()
        with CaptureLogger(logging.get_logger()) as quiet:
            make(tmp_path / "2", max_steps=1, log_level="error").train()
    finally:
        logging.set_verbosity(before)
    assert "Running training" in seen.out
    assert "Running training" not in quiet.out


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BertModel.*cannot be used as is.*AutoModelForSequenceClassification"):
        Trainer(tiny_bert().bert, arguments(tmp_path))


class OutOfMemory(TrainerCallback):
    """Runs out of memory after a step, while batches are large."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.train_batch_size >= 8:
            raise RuntimeError("CUDA out of memory.")


def test_memory_that_runs_out_in_a_callback_begins_the_run_again_with_smaller_batches(tmp_path: Path) -> None:
    options = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make(tmp_path, callbacks=[OutOfMemory()], **options)
    trainer.train()
    assert trainer._train_batch_size == trainer.state.train_batch_size == 7
    assert trainer.state.global_step == 2
    again = make(tmp_path, **{**options, "max_steps": 4})
    again.train(resume_from_checkpoint=True)
    assert (again._train_batch_size, again.state.global_step) == (7, 4)
