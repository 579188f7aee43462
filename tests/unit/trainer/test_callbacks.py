"""Callbacks: added, removed, listened to; early stopping; trackers; search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback

from trainer_toys import (
    Accuracy,
    PretrainedRegression,
    Recorder,
    Regression,
    RegressionConfig,
    RegressionDataset,
    arguments,
)
from tunesmith import Trainer


def make(folder: Path, *, kind: Any = Trainer, model: Any = None, callbacks: Any = None, **options: Any) -> Any:
    return kind(
        Regression() if model is None else model,
        arguments(folder, **options),
        train_dataset=RegressionDataset(),
        eval_dataset=RegressionDataset(length=20, seed=1),
        compute_metrics=Accuracy(),
        callbacks=callbacks,
    )


def names(trainer: Any) -> list[type]:
    return [type(c) for c in trainer.callback_handler.callbacks]


def test_the_default_callbacks_are_those_of_transformers(tmp_path: Path) -> None:
    assert names(make(tmp_path)) == [DefaultFlowCallback, PrinterCallback]
    assert names(make(tmp_path, disable_tqdm=False)) == [DefaultFlowCallback, ProgressCallback]
    assert names(make(tmp_path, callbacks=[Recorder])) == [DefaultFlowCallback, Recorder, PrinterCallback]


def test_callbacks_are_added_popped_and_removed_by_class_or_object(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.add_callback(Recorder)
    mine = trainer.pop_callback(Recorder)
    assert isinstance(mine, Recorder)
    trainer.add_callback(mine)
    trainer.remove_callback(mine)
    assert names(trainer) == [DefaultFlowCallback, PrinterCallback]
    assert trainer.pop_callback(Recorder) is None


def test_a_callback_sees_model_optimizer_scheduler_and_loaders(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.update(kwargs)

    trainer = make(tmp_path, callbacks=[Look()], max_steps=1)
    trainer.train()
    assert seen["model"] is trainer.model
    assert seen["optimizer"] is trainer.optimizer
    assert seen["lr_scheduler"] is trainer.lr_scheduler
    assert seen["train_dataloader"] is not None


def test_early_stopping_ends_the_run_and_the_best_weights_come_back(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        callbacks=[EarlyStoppingCallback(1, 0.0001)],
        model=PretrainedRegression(RegressionConfig(a=2.0, b=3.0)),
        num_train_epochs=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    output = trainer.train()
    assert output.global_step < 20 * 8
    assert trainer.state.best_metric == max(
        e["eval_accuracy"] for e in trainer.state.log_history if "eval_accuracy" in e
    )


def test_early_stopping_needs_a_metric_and_an_evaluation(tmp_path: Path) -> None:
    trainer = make(tmp_path, callbacks=[EarlyStoppingCallback()], max_steps=1)
    with pytest.raises(AssertionError, match="requires"):
        trainer.train()


def test_log_may_be_overridden(tmp_path: Path) -> None:
    class Own(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

    trainer = make(tmp_path, kind=Own, logging_steps=4, max_steps=4)
    trainer.train()
    assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history)


def test_tensorboard_gets_the_curves_through_transformers_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make(tmp_path / "run", report_to="tensorboard", logging_steps=2, max_steps=4).train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]


def test_a_search_with_optuna_returns_the_best_run(tmp_path: Path) -> None:
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


def test_a_search_needs_model_init(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(RuntimeError, match="model_init"):
        make(tmp_path).hyperparameter_search(n_trials=1)


def test_a_model_card_is_written(tmp_path: Path) -> None:
    trainer = make(tmp_path, model=PretrainedRegression(RegressionConfig()), eval_strategy="epoch", num_train_epochs=1)
    trainer.train()
    trainer.create_model_card(tags="toy", model_name="line")
    text = (tmp_path / "README.md").read_text()
    assert "# line" in text
    assert "learning_rate: 0.1" in text
