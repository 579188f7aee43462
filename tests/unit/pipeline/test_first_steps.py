"""A run says once, after its first steps, what the whole of it will take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tunesmith.events import StepDone
from tunesmith.pipeline import short_run
from tunesmith.pipeline.planning import announce_plan
from tunesmith.training.evaluation import TOKENS_AT_ONCE
from tunesmith.training.schedule import Plan, Schedule


def said_by(steps: int) -> list[str]:
    lengths = np.full(800, 25)
    batches = SimpleNamespace(rows=SimpleNamespace(lengths=lengths), steps_in_epoch=lambda epoch: 100, world=1)
    state = SimpleNamespace(model=torch.nn.Linear(10, 10))
    prepared: Any = SimpleNamespace(batches=batches, state=state, runtime=SimpleNamespace(device=torch.device("cpu")))
    said: list[str] = []
    on = announce_plan(prepared, Plan(steps, (100,), Schedule("linear", 1e-4, 0, steps, {}), seed=0), said.append)
    for step in range(1, min(steps, 60) + 1):
        # The first steps are slow, and the measured ones have twice the tokens of the mean one.
        on(StepDone(step, 0.0, 1.0, 1.0, 1e-4, 8, 400, 400, seconds=9.0 if step < 4 else 2.0))
    return said


def test_the_steps_are_forecast_once_by_their_tokens() -> None:
    said = said_by(100)
    assert len(said) == 1
    assert said[0].startswith("Plan: 100 steps take about 100 s, ")


def test_a_short_run_is_not_forecast() -> None:
    assert said_by(39) == []


@pytest.mark.parametrize(("on_gpu", "longest"), [(False, 64), (True, 64), (True, 1_024)])
def test_a_short_run_evaluates_a_whole_batch_of_the_longest_rows_and_some_of_every_length(
    on_gpu: bool, longest: int
) -> None:
    lengths = np.random.default_rng(0).integers(5, 32 if longest > 64 else 512, 6_000)
    lengths[:10] = TOKENS_AT_ONCE[on_gpu] // longest
    kept = short_run._spread_rows(lengths, on_gpu=on_gpu)
    assert len(kept) == longest + short_run.EVALUATED_ROWS[on_gpu]
    chosen = sorted(lengths[kept])
    assert chosen[-longest:] == sorted(lengths)[-longest:]
    assert abs(np.median(chosen[:-longest]) - np.median(sorted(lengths)[:-longest])) <= 0.05 * np.median(lengths)
