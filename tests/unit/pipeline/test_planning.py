"""The plan of a run: its epochs end where those of the batches do, whatever the flags say."""

from __future__ import annotations

from itertools import accumulate

import pytest

from conftest import token_lists
from tunesmith.config.options import RunConfig
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.labels import Task
from tunesmith.metrics.table import make_suite
from tunesmith.pipeline.prepare import make_plan
from tunesmith.training.schedule import Plan


def plan_of(batches: Batches, **options: object) -> Plan:
    config = RunConfig(**options)  # type: ignore[arg-type]
    return make_plan(config, batches, make_suite(Task.BINARY), has_validation=True)


@pytest.mark.parametrize("options", [{"max_steps": 200}, {"num_train_epochs": 7.5}])
def test_epochs_of_a_token_budget_end_where_the_batches_end_also_beyond_num_train_epochs(
    options: dict[str, object],
) -> None:
    rows = TokenRows.from_lists(token_lists(70))
    batches = Batches(rows, Padding(), 4, seed=5, token_budget=60, shuffle_window=2)
    plan = plan_of(batches, token_budget=60, **options)
    lengths = [batches.steps_in_epoch(e) for e in range(len(plan.epoch_ends))]
    assert len(set(lengths)) > 1, "the epochs must differ"
    assert plan.epoch_ends == tuple(accumulate(lengths))
    assert plan.evaluate.ends == frozenset(plan.epoch_ends)


def test_evaluations_by_steps_come_as_often_as_log_lines_unless_eval_steps_says_otherwise() -> None:
    batches = Batches(TokenRows.from_lists(token_lists(70)), Padding(), 4, seed=5)
    logged = {"eval_strategy": "steps", "logging_steps": 50, "max_steps": 400}
    assert plan_of(batches, **logged).evaluate.every == 50
    assert plan_of(batches, **logged, eval_steps=20).evaluate.every == 20
    assert plan_of(batches, **{**logged, "logging_steps": 0.25}).evaluate.every == 100
