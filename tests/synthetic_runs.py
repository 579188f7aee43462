"""Journals of known cause, for the tests of curves, diagnosis and report: shapes as seen in real fine-tuning runs.

Loaded by path (tests are no package): see tests/unit/curves/conftest.py.
"""

from __future__ import annotations

import math
import random
from typing import Any

from tunesmith.events import (
    EpochStarted,
    Evaluated,
    Event,
    Improved,
    NonFinite,
    RunEnded,
    RunStarted,
    StepDone,
)

CONFIG: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "eval_strategy": "epoch",
}
PRIOR = 0.63
"""Entropy of MRPC's class prior (68.4 / 31.6), in nats."""


def make_run(
    train: list[float],
    validation: list[float],
    *,
    accuracy: list[float] | None = None,
    train_accuracy: list[float] | None = None,
    start: float = 0.69,
    steps_per_epoch: int = 100,
    noise: float = 0.2,
    n: int = 408,
    train_rows: int = 1600,
    seed: int = 0,
    planned_epochs: int | None = None,
    ended: str | None = "completed",
    nan_after: int | None = None,
    train_sample: bool = True,
    metric: str = "accuracy",
) -> list[Event]:
    """One epoch per value: `train` and `validation` are losses at the epochs' ends. Steps are noisy around `train`."""
    pick = random.Random(seed)
    epochs = len(train)
    total = steps_per_epoch * (planned_epochs or epochs)
    events: list[Event] = [
        RunStarted("run", 0, total, float(steps_per_epoch), planned_epochs or epochs, train_rows, 1.7e9)
    ]
    best, step = -math.inf, 0
    for epoch in range(epochs):
        events.append(EpochStarted(epoch, step))
        low = train[epoch - 1] if epoch else start
        for k in range(1, steps_per_epoch + 1):
            step += 1
            if nan_after is not None and step > nan_after:
                events += [
                    _step(step, step / steps_per_epoch, None, None, total),
                    NonFinite(step, "loss", "loss", (3, 4)),
                ]
                return [*events, RunEnded(step, "NumericsError", 1.7e9)]
            mean = low + (train[epoch] - low) * k / steps_per_epoch
            loss = max(1e-4, mean * (1 + noise * pick.gauss(0, 1)))
            events.append(_step(step, step / steps_per_epoch, loss, 1.5 + pick.random(), total))
        score = (accuracy or [0.7] * epochs)[epoch]
        done = epoch + 1.0
        if train_sample:
            seen = (train_accuracy or [min(1.0, 1 - t * 0.5) for t in train])[epoch]
            events.append(Evaluated(step, done, "train_sample", {"loss": train[epoch], metric: seen}, 256, 0.4))
        events.append(Evaluated(step, done, "validation", {"loss": validation[epoch], metric: score}, n, 0.9))
        if score > best:
            best = score
            events.append(Improved(step, metric, score))
    return [*events, RunEnded(step, ended, 1.7e9)] if ended else events


def _step(step: int, epoch: float, loss: float | None, norm: float | None, total: int) -> StepDone:
    return StepDone(step, epoch, loss, norm, 5e-5 * (1 - step / total), 16, 850, 880, 0.05)
