"""The rules of `--recipe auto`: a flag wins, and every decision has a reason."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tunesmith.config.options import Recipe, RunConfig
from tunesmith.labels import Task
from tunesmith.pipeline.recipe import FEWEST_STEPS, RunFacts, decide

FACTS = RunFacts("bert", 384, 6, 2000, 2, Task.BINARY, pooling="mean", why="best", no_head=None)


PLAIN = RunConfig()


def test_few_validation_rows_choose_no_weights() -> None:
    few = replace(FACTS, judged=19)
    assert values(facts=few)["load_best_model_at_end"] is False
    assert "load_best_model_at_end" not in values(facts=replace(FACTS, judged=20))
    assert "load_best_model_at_end" not in values(RunConfig(load_best_model_at_end=True), few)
    assert "load_best_model_at_end" not in values(RunConfig(early_stopping_patience=2), few)


def values(config: RunConfig = PLAIN, facts: RunFacts = FACTS) -> dict[str, Any]:
    return {d.name: d.value for d in decide(config, facts)}


def test_everything_that_a_recipe_holds_is_decided_with_a_reason() -> None:
    decisions = decide(RunConfig(), replace(FACTS, pairs=True))
    assert {d.name for d in decisions} == {*(f.name for f in fields(Recipe)), "head_start"}
    assert all(d.reason and d.line().startswith(d.name) for d in decisions)


@pytest.mark.parametrize("name", [f.name for f in fields(Recipe)])
def test_what_is_given_is_not_decided(name: str) -> None:
    given = {"pooling": "first"}.get(name, 1)
    assert name not in values(RunConfig(**{name: given}))  # type: ignore[arg-type]


def test_a_wider_model_takes_smaller_steps() -> None:
    rates = [values(facts=replace(FACTS, width=width))["learning_rate"] for width in (256, 384, 768, 1024)]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] == pytest.approx(1e-4)
    assert values(facts=replace(FACTS, model_type="deberta-v2"))["learning_rate"] == pytest.approx(5e-5)


def test_larger_weights_take_larger_steps_up_to_twice() -> None:
    rates = [values(facts=replace(FACTS, matrix_size=size))["learning_rate"] for size in (0.02, 0.061, 0.09, 0.16)]
    assert rates == pytest.approx([1e-4, 1e-4, 1.5e-4, 2e-4])
    base = replace(FACTS, width=768, matrix_size=0.043)
    assert values(facts=base)["learning_rate"] == pytest.approx(3.5e-5), "wider models have smaller weights"
    assert values(facts=replace(FACTS, model_type="modernbert", matrix_size=0.2))["learning_rate"] == 2e-4


@pytest.mark.parametrize(
    ("rows", "epochs"), [(2000, 3.0), (20_000, 3.0), (500, 7.0), (128, 10.0), (96, 12.0), (30, 30.0)]
)
def test_few_rows_are_passed_more_often(rows: int, epochs: float) -> None:
    found = values(facts=replace(FACTS, rows=rows))
    assert found["num_train_epochs"] == epochs
    steps = epochs * rows / found["per_device_train_batch_size"]
    assert steps >= FEWEST_STEPS or epochs >= 10.0


def test_a_rare_label_is_watched_by_f1() -> None:
    rare = replace(FACTS, rarest=(1, "spam", 0.04), metrics=("accuracy", "f1"))
    assert values(facts=rare)["metric_for_best_model"] == "f1"
    assert "metric_for_best_model" not in values(facts=replace(rare, rarest=(1, "spam", 0.3)))
    several = replace(rare, task=Task.MULTICLASS, rarest=(3, "d", 0.01), metrics=("accuracy", "f1_macro"))
    assert values(facts=several)["metric_for_best_model"] == "f1_macro"
    assert "metric_for_best_model" not in values(RunConfig(metric_for_best_model="accuracy"), rare)


def test_ranks_share_the_rows_of_a_step() -> None:
    assert values(facts=replace(FACTS, world=4))["per_device_train_batch_size"] == 2


def test_a_head_starts_fitted_where_a_new_one_would_learn_little() -> None:
    assert (values(RunConfig(max_steps=60))["head_start"], values()["head_start"]) == ("on", "off")
    assert values(RunConfig(num_train_epochs=3.0), replace(FACTS, rows=200))["head_start"] == "on"
    assert [values(facts=replace(FACTS, rows=rows))["head_start"] for rows in (16, 96, 120, 128)] == [
        "on",
        "on",
        "on",
        "off",
    ]
    assert values(RunConfig(max_steps=60), replace(FACTS, no_head="no"))["head_start"] == "off"


@pytest.mark.parametrize(("rows", "steps"), [(500, 200), (4000, 375), (50_000, 600)])
def test_pairs_are_learned_first_for_about_as_long_as_the_rows(rows: int, steps: int) -> None:
    facts = replace(FACTS, rows=rows, pairs=True, why_pairs="R2 0.4", new_head=True)
    assert values(facts=facts)["pair_start"] == steps
    assert values(facts=replace(facts, pairs=False))["pair_start"] == 0
    assert "pair_start" not in values(facts=replace(facts, pairs=None)), "rows of one text"
