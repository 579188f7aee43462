"""fp16 under the Trainer: the scheduler waits while updates are skipped, as in transformers; a NaN ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.errors import NumericsError
from tunesmith.training.state import LossScale, TrainState


class Scaled(Trainer):
    scale = 65536.0

    def _make_engine(self) -> TrainState:
        engine = super()._make_engine()
        engine.loss_scale = LossScale.start(torch.device("cpu"), self.scale)
        return engine


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.seen.append(lr_scheduler.get_last_lr()[0])


def test_the_scheduler_is_not_stepped_when_the_update_was_skipped(tmp_path: Path) -> None:
    rates = Rates()
    kind = type("Kind", (Scaled,), {"scale": 2.0**66})
    trainer = kind(
        Regression(), arguments(tmp_path, max_steps=12), train_dataset=RegressionDataset(), callbacks=[rates]
    )
    trainer.train()
    skipped = 12 - int(next(iter(trainer.optimizer.state.values()))["step"])
    assert 0 < skipped < 10
    assert trainer.lr_scheduler.last_epoch == 12 - skipped
    assert rates.seen[:skipped] == [0.1] * skipped
    assert rates.seen[skipped] < 0.1


def test_a_nan_loss_ends_an_fp16_run(tmp_path: Path) -> None:
    data = RegressionDataset()
    data.ys[0][:] = float("nan")
    with pytest.raises(NumericsError, match="loss"):
        Scaled(Regression(), arguments(tmp_path, max_steps=12), train_dataset=data).train()
