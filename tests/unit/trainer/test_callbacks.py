"""Hyperparameter search of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_toys import (
    Accuracy,
    PretrainedRegression,
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
