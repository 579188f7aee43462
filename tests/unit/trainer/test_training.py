"""Training with Trainer: loaders, optimizers, schedulers, overrides, streams, precision, NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from trainer_toys import Accuracy, PretrainedRegression, Regression, RegressionConfig, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.errors import NumericsError
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


def test_training_matches_transformers_and_is_repeatable(tmp_path: Path) -> None:
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
def test_order_does_not_depend_on_workers(tmp_path: Path, workers: int) -> None:
    plain, other = make(tmp_path / "1"), make(tmp_path / "2", dataloader_num_workers=workers)
    plain.train()
    other.train()
    assert torch.equal(plain.model.a, other.model.a)


def test_data_seed_changes_the_order(tmp_path: Path) -> None:
    runs = [make(tmp_path / str(seed), data_seed=seed) for seed in (None, 42, 7)]
    for run in runs:
        run.train()
    assert torch.equal(runs[0].model.a, runs[1].model.a)
    assert not torch.equal(runs[0].model.a, runs[2].model.a)


def test_training_step_can_be_wrapped_or_replaced(tmp_path: Path) -> None:
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


def test_nan_or_infinite_loss_stops_run_and_keeps_weights(tmp_path: Path) -> None:
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


def test_training_step_can_be_called_before_train(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    inputs = {"input_x": torch.tensor([1.0, 2.0]), "labels": torch.tensor([1.0, 3.0])}
    loss = trainer.training_step(trainer.model, dict(inputs), 2)
    predicted = trainer.prediction_step(trainer.model, dict(inputs), prediction_loss_only=True)[0]
    assert torch.equal(loss, predicted)
    assert loss.item() == pytest.approx(5.0)
    assert trainer.model.a.grad is not None


def test_optuna_search_returns_the_best_run(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer = Trainer(
        args=arguments(tmp_path, eval_strategy="epoch", num_train_epochs=2, save_strategy="epoch", run_name="test"),
        train_dataset=RegressionDataset(),
        eval_dataset=RegressionDataset(length=20, seed=1),
        model_init=lambda trial: PretrainedRegression(
            RegressionConfig(a=trial.suggest_int("a", -4, 4) if trial is not None else 0, b=3)
        ),
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
        direction="minimize",
        n_trials=3,
        hp_name=lambda trial: f"trial-{trial.number}",
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    assert set(best.hyperparameters) == {"a", "learning_rate"}
    assert best.objective < 200
    assert sorted(p.name for p in tmp_path.glob("trial-*")) == ["trial-0", "trial-1", "trial-2"]
    assert len(list(tmp_path.glob("trial-*/journal.jsonl"))) == 3
