"""Best metric and patience."""

from __future__ import annotations

import pytest

from tunesmith.errors import ConfigError
from tunesmith.training.loop import metric_value
from tunesmith.training.state import BestSoFar


def follow(values: list[float | None], *, greater: bool, min_delta: float = 0.0) -> tuple[BestSoFar, list[bool]]:
    progress, gains = BestSoFar(), []
    for step, value in enumerate(values, 1):
        progress, better = progress.updated(value, step, greater_is_better=greater, min_delta=min_delta)
        gains.append(better)
    return progress, gains


def test_the_best_value_is_kept_and_evaluations_without_gain_are_counted() -> None:
    progress, gains = follow([0.5, 0.7, 0.7, 0.6], greater=True)
    assert gains == [True, True, False, False]
    assert progress == BestSoFar(0.7, 2, 2)
    assert progress.is_exhausted(2)
    assert not progress.is_exhausted(3)
    assert not progress.is_exhausted(None)


def test_less_is_better_for_a_loss() -> None:
    assert follow([0.5, 0.4, 0.45], greater=False)[0] == BestSoFar(0.4, 2, 1)


def test_a_gain_below_the_minimum_is_the_best_but_does_not_reset_patience() -> None:
    progress, gains = follow([0.50, 0.505], greater=True, min_delta=0.01)
    assert gains == [True, True]
    assert progress == BestSoFar(0.505, 2, 1)


def test_a_value_that_is_not_finite_is_never_the_best() -> None:
    assert follow([float("nan"), None, 0.3, float("inf")], greater=True)[0] == BestSoFar(0.3, 3, 1)


def test_an_unknown_metric_names_the_nearest() -> None:
    assert metric_value({"loss": 0.1, "f1": 0.5}, "eval_f1") == 0.5
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        metric_value({"loss": 0.1, "accuracy": 0.5}, "acuracy")
