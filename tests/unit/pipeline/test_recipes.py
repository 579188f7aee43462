"""The recipe of a run is decided once with reasons, stored, kept on resume, and never overrides a flag."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from tiny_model import mood, sentences
from tunesmith.config.load import load_config
from tunesmith.config.options import Recipe, RunConfig
from tunesmith.errors import ConfigError
from tunesmith.inference.predictor import Predictor
from tunesmith.labels import Task
from tunesmith.pipeline.recipe import FEWEST_STEPS, RunFacts, decide


@pytest.fixture
def told(train: Any, tmp_path: Path) -> Any:
    options = {"learning_rate": None, "output_dir": tmp_path / "auto", "pooling": "mean"}
    return train(train_data=mood(120), test_data=mood(30), **options)


def test_recipe_is_reported_and_stored(told: Any) -> None:
    result, said = told
    lines = [line for line in said if line.startswith("Recipe: ")]
    assert any("learning_rate 0.00015: from the hidden size of the model (32)" in line for line in lines)
    config = load_config(result.run.config_file, need_data=False)
    assert (config.recipe, config.pooling, config.head_start) == ("auto", "mean", "on")
    assert config.learning_rate == 1.5e-4
    assert config.max_steps == 4
    baselines = json.loads(result.run.metrics_file.read_text())["baselines"]
    assert set(baselines) == {"validation", "test"}
    for scores in baselines["test"].values():
        assert scores["accuracy"]["n"] == 30
    shown = "Baselines, test accuracy (n=30): frozen features + linear head 1.000, TF-IDF + linear model 1.000."
    assert [line for line in said if "aseline" in line] == [shown]


def test_mean_model_loads_in_transformers(told: Any) -> None:
    folder = told[0].run.model
    texts = [text for text, _ in sentences(12, seed=9)]
    ours = torch.from_numpy(Predictor.load(told[0].run.path, use_cpu=True).probabilities(texts))
    theirs = pipeline("text-classification", str(folder), top_k=None, device="cpu")(texts)
    names = AutoModelForSequenceClassification.from_pretrained(folder).config.id2label
    table = torch.tensor(
        [[next(s["score"] for s in row if s["label"] == names[i]) for i in range(2)] for row in theirs]
    )
    assert (ours - table).abs().max() < 1e-5


def test_recipe_hf_equals_transformers_defaults(train: Any) -> None:
    result, said = train(train_data=mood(80), recipe="hf", learning_rate=None)
    config = load_config(result.run.config_file, need_data=False)
    assert (config.learning_rate, config.warmup_steps, config.weight_decay) == (5e-5, 0, 0.0)
    assert (config.pooling, config.head_start, config.num_train_epochs) == ("pooler", "off", 3.0)
    assert not [line for line in said if line.startswith(("Recipe", "Baseline"))]


def test_resumed_run_keeps_its_recipe(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "train_data": mood(120),
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": None,
    }
    monkeypatch.setenv("TUNESMITH_FAULT", "step.end:term:3")
    with pytest.raises(BaseException):  # noqa: B017 - stopped by the signal
        train(**options, output_dir=tmp_path / "run")
    monkeypatch.delenv("TUNESMITH_FAULT")
    monkeypatch.setattr("tunesmith.pipeline.recipe.linear_probe", lambda *_: pytest.fail("the probe ran again"))
    result, said = train(**options, output_dir=tmp_path / "run")
    assert result.steps == 4
    assert [line for line in said if line.startswith("Recipe: pooling")]


def test_few_rows_have_no_probe(train: Any) -> None:
    result, said = train(train_data=mood())
    assert any("Recipe: pooling mean: too few rows for a probe" in line for line in said)
    assert "baselines" not in json.loads(result.run.metrics_file.read_text())


def test_trained_head_is_kept(train: Any, tmp_path: Path) -> None:
    first, _ = train(train_data=mood(80), output_dir=tmp_path / "first")
    _, said = train(train_data=mood(80), output_dir=tmp_path / "second", model_name_or_path=first.run.model)
    assert any("Recipe: pooling pooler: the only pooling that this model supports" in line for line in said)
    assert any("Recipe: head_start off" in line for line in said)


FEW: dict[str, Any] = {"max_steps": -1, "num_train_epochs": None, "learning_rate": None}


@pytest.mark.parametrize("numbers", [False, True])
def test_head_of_few_rows_starts_fitted(train: Any, tmp_path: Path, numbers: bool) -> None:
    """The learning rate is so small that the weights stay unchanged."""
    rows = mood(24)
    if numbers:
        rows = [{**row, "label": 1.5 if row["label"] == "good" else 0.5} for row in rows]
    said = train(train_data=rows, max_steps=1, learning_rate=1e-12, output_dir=tmp_path)[1]
    assert "Recipe: head_start on: a random head would learn little in 1 updates." in said
    found = Predictor.load(tmp_path, use_cpu=True).predict([row["text"] for row in rows])
    right = [abs(f - row["label"]) < 0.5 if numbers else f == row["label"] for f, row in zip(found, rows, strict=True)]
    assert sum(right) >= 18, "a random head has about 12"


def test_last_weights_are_kept_with_few_validation_rows(train: Any, tmp_path: Path) -> None:
    result, said = train(train_data=mood())
    assert "Recipe: load_best_model_at_end false: 4 validation rows are too few to select the best weights." in said
    assert result.best_step is None
    assert load_config(result.run.config_file, need_data=False).load_best_model_at_end is False
    _, said = train(train_data=mood(), validation_data=mood(30), output_dir=tmp_path / "more")
    assert not any("load_best_model_at_end" in line for line in said)


def pairs(count: int, *, random_labels: bool = False) -> list[dict[str, Any]]:
    """Return pairs of equal or different sentences; the label depends on equality, or is unrelated."""
    texts = [text for text, _ in sentences(count)]
    rows = [{"sentence1": text, "sentence2": text if i % 2 else texts[i - 7]} for i, text in enumerate(texts)]
    same = [i % 4 < 2 if random_labels else i % 2 for i in range(count)]
    return [{**row, "label": "same" if yes else "other"} for row, yes in zip(rows, same, strict=True)]


def test_pair_warmup_trains_without_labels(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEWEST_PAIR_STEPS", 8)
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_PAIR_STEPS", 8)
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEW_ROWS_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.USUAL_EPOCHS", 1.0)
    result, said = train(train_data=pairs(120, random_labels=True), **FEW)
    assert any(line.startswith("Recipe: pair_start 8: R2 of held-out examples") for line in said)
    assert load_config(result.run.config_file, need_data=False).pair_start == 8
    text = {"text": "a day", "text_pair": "a day"}
    theirs = pipeline("text-classification", str(result.run.model), top_k=None, device="cpu")(text)
    ours = Predictor.load(result.run.path, use_cpu=True).probabilities(["a day"], ["a day"])[0]
    assert sorted(ours) == pytest.approx(sorted(row["score"] for row in theirs), abs=1e-5)


@pytest.mark.parametrize(
    ("rows", "options", "line"),
    [
        (40, {}, "pair_start 0: 36 examples are too few"),
        (120, {"num_train_epochs": 1.0}, "pair_start 0: the number of steps or epochs is set"),
        (120, {"pair_start": 0}, None),
    ],
)
def test_pair_warmup_is_skipped_by_few_examples_or_a_flag(
    train: Any, monkeypatch: pytest.MonkeyPatch, rows: int, options: dict[str, Any], line: str | None
) -> None:
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEW_ROWS_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.warm_up_on_pairs", lambda *_, **__: pytest.fail("it ran"))
    _, said = train(train_data=pairs(rows), **{**FEW, **options})
    lines = [text for text in said if "pair_start" in text]
    assert [text.startswith(f"Recipe: {line}") for text in lines] == ([] if line is None else [True])


def test_run_with_pair_warmup_resumes_bit_for_bit(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"train_data": pairs(60), "save_strategy": "steps", "save_steps": 2, **FEW}
    options |= {"max_steps": 5, "pair_start": 6, "head_start": "on", "seed": 3}
    whole, _ = train(**options, output_dir=tmp_path / "whole")
    monkeypatch.setenv("TUNESMITH_FAULT", "step.end:term:3")
    with pytest.raises(BaseException):  # noqa: B017 - stopped by the signal
        train(**options, output_dir=tmp_path / "run")
    monkeypatch.delenv("TUNESMITH_FAULT")
    monkeypatch.setattr("tunesmith.pipeline.recipe.warm_up_on_pairs", lambda *_, **__: pytest.fail("a second time"))
    again, _ = train(**options, output_dir=tmp_path / "run")
    weights = [(r.run.model / "model.safetensors").read_bytes() for r in (whole, again)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("options", [{"train_data": mood(60)}, {"train_data": pairs(60), "freeze": ("embeddings",)}])
def test_impossible_pair_start_is_refused(train: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--pair_start 6 is not possible"):
        train(pair_start=6, **options)


FACTS = RunFacts("bert", 384, 6, 2000, 2, Task.BINARY, pooling="mean", why="best", no_head=None)


PLAIN = RunConfig()


def values(config: RunConfig = PLAIN, facts: RunFacts = FACTS) -> dict[str, Any]:
    return {d.name: d.value for d in decide(config, facts)}


def test_every_recipe_option_has_a_reason() -> None:
    decisions = decide(RunConfig(), replace(FACTS, pairs=True))
    assert {d.name for d in decisions} == {*(f.name for f in fields(Recipe)), "head_start"}
    assert all(d.reason and d.line().startswith(d.name) for d in decisions)


@pytest.mark.parametrize("name", [f.name for f in fields(Recipe)])
def test_option_that_is_set_is_not_decided(name: str) -> None:
    given = {"pooling": "first"}.get(name, 1)
    assert name not in values(RunConfig(**{name: given}))  # type: ignore[arg-type]


def test_wider_models_get_smaller_learning_rates() -> None:
    rates = [values(facts=replace(FACTS, width=width))["learning_rate"] for width in (256, 384, 768, 1024)]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] == pytest.approx(1e-4)
    assert values(facts=replace(FACTS, model_type="deberta-v2"))["learning_rate"] == pytest.approx(5e-5)


@pytest.mark.parametrize(("rows", "epochs"), [(2000, 3.0), (500, 7.0), (96, 12.0), (30, 30.0)])
def test_few_rows_get_more_epochs(rows: int, epochs: float) -> None:
    found = values(facts=replace(FACTS, rows=rows))
    assert found["num_train_epochs"] == epochs
    steps = epochs * rows / found["per_device_train_batch_size"]
    assert steps >= FEWEST_STEPS or epochs >= 10.0


def test_rare_label_selects_f1() -> None:
    rare = replace(FACTS, rarest=(1, "spam", 0.04), metrics=("accuracy", "f1"))
    assert values(facts=rare)["metric_for_best_model"] == "f1"
    assert "metric_for_best_model" not in values(facts=replace(rare, rarest=(1, "spam", 0.3)))
    several = replace(rare, task=Task.MULTICLASS, rarest=(3, "d", 0.01), metrics=("accuracy", "f1_macro"))
    assert values(facts=several)["metric_for_best_model"] == "f1_macro"
    assert "metric_for_best_model" not in values(RunConfig(metric_for_best_model="accuracy"), rare)


def test_ranks_share_the_batch() -> None:
    assert values(facts=replace(FACTS, world=4))["per_device_train_batch_size"] == 2
