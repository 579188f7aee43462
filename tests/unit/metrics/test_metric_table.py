"""The table of metrics: each name has its own value and interval, and a metric is added in one place."""

from __future__ import annotations

import re

import pytest

from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.metrics import table
from tunesmith.metrics.paired import compare_predictions
from tunesmith.metrics.table import (
    greater_is_better,
    make_suite,
    metric_of,
)


@pytest.mark.parametrize("name", ["brier", "f1_makro", "loss", "", "rmse"])
@pytest.mark.parametrize("task", list(Task))
def test_a_name_that_is_not_in_the_table_has_neither_value_nor_interval(name: str, task: Task) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown metric {name!r}")):
        metric_of(name, task)
    with pytest.raises(ConfigError):
        make_suite(task, names=[name])
    with pytest.raises(ConfigError):
        compare_predictions([1, 0], [1, 1], [1, 0], task=task, metric=name)


def test_the_direction_comes_from_the_table_and_for_other_names_from_their_ending() -> None:
    lower = {m.name for m in table.METRICS if not greater_is_better(m.name)}
    assert lower == {"log_loss", "mse", "mae"}
    assert not any(map(greater_is_better, ("loss", "my_loss", "rmse", "token_error", "brier", "dev_mse")))
    assert all(map(greater_is_better, ("bleu", "lossless", "exact_match")))
