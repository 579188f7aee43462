"""The table of metrics: each name has its own value and interval, and a metric is added in one place."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tunesmith.config.options import RunConfig
from tunesmith.config.validate import find_problems
from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.metrics import table
from tunesmith.metrics.intervals import wilson_pair
from tunesmith.metrics.paired import compare_predictions
from tunesmith.metrics.table import (
    DEFAULTS,
    GLUE,
    Metric,
    Rows,
    greater_is_better,
    load,
    make_suite,
    metric_aliases,
    metric_names,
    metric_of,
)


def test_a_name_stands_once_for_a_task_and_an_alias_for_one_name() -> None:
    pairs = [(metric.name, task) for metric in table.METRICS for task in metric.tasks]
    assert len(pairs) == len(set(pairs))
    aliases = [alias for metric in table.METRICS for alias in metric.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(metric_names())
    assert all(metric.help.endswith(".") for metric in table.METRICS)


def test_what_tasks_report_is_in_the_table() -> None:
    for task, names in [*DEFAULTS.items(), *GLUE.values()]:
        assert set(names) <= set(metric_names(task))


@pytest.mark.parametrize("name", ["brier", "f1_makro", "loss", "", "rmse"])
@pytest.mark.parametrize("task", list(Task))
def test_a_name_that_is_not_in_the_table_has_neither_value_nor_interval(name: str, task: Task) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown metric {name!r}")):
        metric_of(name, task)
    with pytest.raises(ConfigError):
        make_suite(task, names=[name])
    with pytest.raises(ConfigError):
        compare_predictions([1, 0], [1, 1], [1, 0], task=task, metric=name)


@pytest.mark.parametrize("task", list(Task))
def test_a_metric_of_another_task_is_refused(task: Task) -> None:
    for name in set(metric_names()) - set(metric_names(task)):
        with pytest.raises(ConfigError, match=f"is not defined for a {task.value} task"):
            metric_of(name, task)


def test_the_direction_comes_from_the_table_and_for_other_names_from_their_ending() -> None:
    lower = {m.name for m in table.METRICS if not greater_is_better(m.name)}
    assert lower == {"log_loss", "mse", "mae"}
    assert not any(map(greater_is_better, ("loss", "my_loss", "rmse", "token_error", "brier", "dev_mse")))
    assert all(map(greater_is_better, ("bleu", "lossless", "exact_match")))


def _misses(rows: Rows) -> float:
    from sklearn.metrics import zero_one_loss

    return float(zero_one_loss(rows.references, rows.decisions))


MISSES = Metric(
    "misses",
    table.SINGLE,
    "Share of rows with a wrong label.",
    _misses,
    lambda rows, value, confidence, seed: wilson_pair(value, len(rows), confidence),
    "wilson",
    greater_is_better=False,
    aliases=("zero_one",),
)


def test_a_metric_added_to_the_table_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "METRICS", (*table.METRICS, MISSES))
    asked = RunConfig(train_file="a.csv", metric_name=("zero_one", "accuracy"), metric_for_best_model="eval_misses")
    assert (asked.metric_name, asked.metric_for_best_model) == (("misses", "accuracy"), "misses")
    assert find_problems(asked) == ()
    assert not greater_is_better("misses")
    assert metric_aliases()["zero_one"] == "misses"
    y = np.arange(40) % 2
    a, b = np.where(np.arange(40) < 30, y, 1 - y), y
    suite = make_suite(Task.BINARY, names=asked.metric_name)
    score = suite.compute_with_intervals(a, y)["misses"]
    assert (score.value, score.n, score.method) == (0.25, 40, "wilson")
    assert (score.low, score.high) == wilson_pair(0.25, 40)
    assert suite.greater_is_better("zero_one") is False
    assert load("misses").compute(b, y) == {"misses": 0.0}
    result = compare_predictions(a, b, y, task=Task.BINARY, metric="misses", resamples=200)
    assert result.difference == -0.25
    assert result.p_value is not None
    assert result.p_value < 0.01
