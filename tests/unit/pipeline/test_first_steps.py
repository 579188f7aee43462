"""A run says once, after its first steps, what the whole of it will take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tunesmith.events import StepDone
from tunesmith.pipeline.plan import announce_plan
from tunesmith.training.schedule import Plan, Schedule


def said_by(steps: int) -> list[str]:
    lengths = np.full(800, 25)
    batches = SimpleNamespace(rows=SimpleNamespace(lengths=lengths), steps_in_epoch=lambda epoch: 100, world=1)
    state = SimpleNamespace(model=torch.nn.Linear(10, 10))
    plan = Plan(steps, (100,), Schedule("linear", 1e-4, 0, steps, {}), seed=0)
    runtime = SimpleNamespace(device=torch.device("cpu"))
    prepared: Any = SimpleNamespace(batches=batches, state=state, plan=plan, runtime=runtime)
    said: list[str] = []
    on = announce_plan(prepared, said.append)
    for step in range(1, min(steps, 60) + 1):
        # The first steps are slow, and the measured ones have twice the tokens of the mean one.
        on(StepDone(step, 0.0, 1.0, 1.0, 1e-4, 8, 400, 400, seconds=9.0 if step < 4 else 2.0))
    return said


def test_the_steps_are_forecast_once_by_their_tokens() -> None:
    said = said_by(100)
    assert len(said) == 1
    assert said[0].startswith("Plan: 100 steps take about 100 s; ")

    assert said_by(39) == []
