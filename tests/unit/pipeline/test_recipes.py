"""The recipe of a run: decided once, told, written down, kept when the run is resumed, and never against a flag."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from tiny_model import sentences, write_csv
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError
from tunesmith.inference.predictor import Predictor
from tunesmith.pipeline import probe
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.plan import PAIR_STEPS, Forecast, measure_run
from tunesmith.pipeline.recipe import pooling_for
from tunesmith.pipeline.watch import PAIR_STAGE, Watch


def mood(count: int) -> list[dict[str, Any]]:
    return [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(count)]


@pytest.fixture
def told(train: Any, tmp_path: Path) -> Any:
    options = {"learning_rate": None, "output_dir": tmp_path / "auto", "pooling": "mean"}
    return train(train_data=mood(120), test_data=mood(30), **options)


def test_a_run_says_what_it_decided_and_its_folder_keeps_it(told: Any) -> None:
    result, said = told
    lines = [line for line in said if line.startswith("Recipe: ")]
    assert any("learning_rate 0.00015: by the width of the model, 32" in line for line in lines)
    config = load_config(result.run.config_file, need_data=False)
    assert (config.recipe, config.pooling, config.head_start) == ("auto", "mean", "on")
    assert config.learning_rate == 1.5e-4
    assert config.max_steps == 4
    floors = json.loads(result.run.metrics_file.read_text())["floors"]
    assert set(floors) == {"validation", "test"}
    for scores in floors["test"].values():
        assert scores["accuracy"]["n"] == 30
    assert any(line.startswith("Baseline: frozen features + linear head, test accuracy") for line in said)


def test_the_mean_model_of_a_run_loads_without_our_code_and_gives_our_probabilities(told: Any) -> None:
    folder = told[0].run.model
    texts = [text for text, _ in sentences(12, seed=9)]
    ours = torch.from_numpy(Predictor.load(told[0].run.path, use_cpu=True).probabilities(texts))
    theirs = pipeline("text-classification", str(folder), top_k=None, device="cpu")(texts)
    names = AutoModelForSequenceClassification.from_pretrained(folder).config.id2label
    table = torch.tensor(
        [[next(s["score"] for s in row if s["label"] == names[i]) for i in range(2)] for row in theirs]
    )
    assert (ours - table).abs().max() < 1e-5


def test_hf_is_what_transformers_does(train: Any) -> None:
    result, said = train(train_data=mood(80), recipe="hf", learning_rate=None)
    config = load_config(result.run.config_file, need_data=False)
    assert (config.learning_rate, config.warmup_steps, config.weight_decay) == (5e-5, 0, 0.0)
    assert (config.pooling, config.head_start, config.num_train_epochs) == ("pooler", "off", 3.0)
    assert not [line for line in said if line.startswith(("Recipe", "Baseline"))]


def test_a_resumed_run_decides_nothing_anew(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    result, said = train(train_data=mood(40))
    assert any("Recipe: pooling mean: too few rows for a probe" in line for line in said)
    assert "floors" not in json.loads(result.run.metrics_file.read_text())


def test_a_trained_head_stays(train: Any, tmp_path: Path) -> None:
    first, _ = train(train_data=mood(80), output_dir=tmp_path / "first")
    _, said = train(train_data=mood(80), output_dir=tmp_path / "second", model_name_or_path=first.run.model)
    assert any("Recipe: pooling pooler: the only way this model has" in line for line in said)
    assert any("Recipe: head_start off" in line for line in said)


def test_the_first_token_is_not_read_through_a_fixed_layer_in_place_of_a_new_one() -> None:
    chosen, why = pooling_for(
        "first", "best on frozen features", ["classifier.dense.weight", "classifier.out_proj.weight"]
    )
    assert chosen == "mean"
    assert why == "the dense layer of the head is new, and the first token was best on frozen features"
    assert pooling_for("first", "best", ["classifier.weight"]) == ("first", "best"), "its pooler is in the checkpoint"
    assert pooling_for("mean", "best", ["classifier.dense.weight"]) == ("mean", "best")


FEW: dict[str, Any] = {"max_steps": -1, "num_train_epochs": None, "learning_rate": None}


@pytest.mark.parametrize("numbers", [False, True])
def test_a_head_of_few_rows_starts_fitted(train: Any, tmp_path: Path, numbers: bool) -> None:
    """The rate is so small that the weights stay as they started."""
    rows = mood(24)
    if numbers:
        rows = [{**row, "label": 1.5 if row["label"] == "good" else 0.5} for row in rows]
    said = train(train_data=rows, max_steps=1, learning_rate=1e-12, output_dir=tmp_path)[1]
    assert "Recipe: head_start on: a new head would learn little in 1 updates." in said
    found = Predictor.load(tmp_path, use_cpu=True).predict([row["text"] for row in rows])
    right = [abs(f - row["label"]) < 0.5 if numbers else f == row["label"] for f, row in zip(found, rows, strict=True)]
    assert sum(right) >= 18, "a random head has about 12"


@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
def test_a_head_fitted_to_what_the_probe_has_read_is_that_of_the_rows_read_again(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: str
) -> None:
    once, again = (
        {"max_steps": 1, "learning_rate": 1e-12, "pooling": pooling, "output_dir": tmp_path / name}
        for name in ("once", "again")
    )
    with monkeypatch.context() as reading:
        reading.setattr(probe, "_inputs_of_head", None)  # it would fail
        train(train_data=mood(80), **once)
    monkeypatch.setattr("tunesmith.pipeline.recipe.reads_linearly", lambda model, pooling: False)
    monkeypatch.setattr(probe, "reads_linearly", lambda model, pooling: False)
    train(train_data=mood(80), **again, head_start="on")
    ours, theirs = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "model").classifier.weight.detach().numpy()
        for name in ("once", "again")
    )
    alike = float((ours * theirs).sum() / np.linalg.norm(ours) / np.linalg.norm(theirs))
    assert alike > 0.98, "features are kept in half precision, and those of a tiny model hardly differ"
    np.testing.assert_allclose(np.linalg.norm(ours), np.linalg.norm(theirs), rtol=0.1)


def test_the_last_weights_are_kept_where_few_rows_judge(train: Any, tmp_path: Path) -> None:
    result, said = train(train_data=mood(40))
    assert "Recipe: load_best_model_at_end false: 4 validation rows cannot tell which weights are the best." in said
    assert result.best_step is None
    assert load_config(result.run.config_file, need_data=False).load_best_model_at_end is False
    _, said = train(train_data=mood(40), validation_data=mood(30), output_dir=tmp_path / "more")
    assert not any("load_best_model_at_end" in line for line in said)


def pairs(count: int, *, told: bool = True) -> list[dict[str, Any]]:
    """Two sentences that are the same or not; the label says so, or nothing."""
    texts = [text for text, _ in sentences(count)]
    rows = [{"sentence1": text, "sentence2": text if i % 2 else texts[i - 7]} for i, text in enumerate(texts)]
    return [{**row, "label": "same" if (i % 2 if told else i % 4 < 2) else "other"} for i, row in enumerate(rows)]


def test_pairs_start_from_separate_readings_where_those_say_more(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEWEST_PAIR_STEPS", 8)
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_PAIR_STEPS", 8)
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEW_ROWS_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.USUAL_EPOCHS", 1.0)
    result, said = train(train_data=pairs(120), **FEW)
    assert any(line.startswith("Recipe: pair_start 8: R2 of held-out examples") for line in said)
    assert load_config(result.run.config_file, need_data=False).pair_start == 8
    text = {"text": "a day", "text_pair": "a day"}
    theirs = pipeline("text-classification", str(result.run.model), top_k=None, device="cpu")(text)
    ours = Predictor.load(result.run.path, use_cpu=True).probabilities(["a day"], ["a day"])[0]
    assert sorted(ours) == pytest.approx(sorted(row["score"] for row in theirs), abs=1e-5)


@pytest.mark.parametrize(
    ("told", "options", "line"),
    [
        (False, {}, "pair_start 0: R2 of held-out examples"),
        (True, {"num_train_epochs": 1.0}, "pair_start 0: the length of the training is given"),
        (True, {"pair_start": 0}, None),
    ],
)
def test_pairs_start_as_they_are_without_evidence_or_by_a_flag(
    train: Any, monkeypatch: pytest.MonkeyPatch, told: bool, options: dict[str, Any], line: str | None
) -> None:
    monkeypatch.setattr("tunesmith.pipeline.recipe.MOST_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.FEW_ROWS_EPOCHS", 1.0)
    monkeypatch.setattr("tunesmith.pipeline.recipe.warm_up_on_pairs", lambda *_, **__: pytest.fail("it ran"))
    _, said = train(train_data=pairs(120, told=told), **{**FEW, **options})
    lines = [text for text in said if "pair_start" in text]
    assert [text.startswith(f"Recipe: {line}") for text in lines] == ([] if line is None else [True])


def test_a_run_that_started_with_pairs_resumes_bit_for_bit(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_pair_start_that_is_not_possible_is_refused(train: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--pair_start 6 is not possible"):
        train(pair_start=6, **options)


def test_a_plan_takes_few_steps_of_a_start_and_forecasts_the_others(tiny: Path, cache: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "pairs.csv", pairs(60))
    given = {"train_file": str(file), "model_name_or_path": str(tiny), "cache_dir": str(cache), "use_cpu": True}
    shown: list[tuple[str, int, int]] = []

    def measure(**options: Any) -> Forecast:
        config = load_config(None, {**given, "num_train_epochs": 1.0, **options})
        watch = Watch(progress=lambda *told: shown.append(told))
        return measure_run(config, read_run_data(config, {}, watch.progress), watch, time.time())

    without, begun = measure(pair_start=0), time.time()
    found, spent = measure(pair_start=4000), time.time() - begun
    steps = [told for told in shown if told[0] == PAIR_STAGE]
    assert steps[-1] == (PAIR_STAGE, PAIR_STEPS, 4000)
    assert found.steps == without.steps
    assert found.start_seconds > spent, "the steps of the start that were not taken are counted"
