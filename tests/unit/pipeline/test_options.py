"""What options do to a run, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tiny_model import sentences
from tunesmith.config.options import OPTIMIZERS, list_options
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.events import Evaluated, RunEnded, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.manifest import read_manifest


def mood(count: int = 40, *, every: int = 2) -> list[dict[str, Any]]:
    return [{"text": t, "label": "good" if i % every == 0 else "bad"} for i, (t, _) in enumerate(sentences(count))]


def losses(result: Any) -> list[float]:
    return [e.loss for e in read_journal(result.run.journal_file) if isinstance(e, StepDone) and e.loss is not None]


def evaluations(result: Any) -> list[int]:
    events = read_journal(result.run.journal_file)
    return [e.step for e in events if isinstance(e, Evaluated) and e.split == "validation"]


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, list[float]]:
    return {}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"pad_to_max_length": True, "max_seq_length": 24}, 1e-5),
        ({"gradient_checkpointing": True}, 1e-5),
        ({"padding_free": "off", "cls_only_last_layer": "off", "restrict_vocabulary": "off"}, 1e-5),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1e-5),
        ({"bf16": True}, 2e-2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_how_a_step_is_computed_does_not_change_what_is_learned(
    options: dict[str, Any], tolerance: float, train: Any, tmp_path: Path, plain_losses: dict[str, list[float]]
) -> None:
    asked = {"train_data": mood(), "max_steps": 6, "train_sampling_strategy": "random"}
    if not plain_losses:
        plain_losses["plain"] = losses(train(**asked, output_dir=tmp_path / "plain")[0])
    found = losses(train(**asked, **options)[0])
    assert len(found) == 6
    assert found == pytest.approx(plain_losses["plain"], abs=tolerance)


def test_the_order_that_was_chosen_belongs_to_the_run(train: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_data": mood(), "save_strategy": "steps", "save_steps": 2}
    result, _ = train(**options, max_steps=2, output_dir=tmp_path / "run")
    stored = read_manifest(next(result.run.path.glob("**/checkpoint-*2")))["config"]
    assert stored["train_sampling_strategy"] == "group_by_length"
    for order, what in ({}, "this config"), ({"train_sampling_strategy": "random"}, "a different config"):
        with pytest.raises(CheckpointError, match=f"a finished run of {what}"):
            train(**options, max_steps=2, output_dir=tmp_path / "run", **order)


def test_fixed_shapes_are_what_the_model_gets(train: Any) -> None:
    result, said = train(train_data=mood(), pad_to_max_length=True, max_seq_length=24)
    steps = [e for e in read_journal(result.run.journal_file) if isinstance(e, StepDone)]
    assert [e.padded_tokens for e in steps] == [e.examples * 24 for e in steps]
    assert "Padding_free is off: a fixed length was requested." in said


def test_balanced_weights_and_label_smoothing_change_the_loss(train: Any, tmp_path: Path) -> None:
    rows = mood(every=5)
    first = losses(train(train_data=rows, output_dir=tmp_path / "a")[0])[0]
    weighted = losses(train(train_data=rows, output_dir=tmp_path / "b", class_weights="balanced")[0])[0]
    smooth = losses(train(train_data=rows, output_dir=tmp_path / "c", label_smoothing_factor=0.5)[0])[0]
    assert weighted != pytest.approx(first, abs=1e-4)
    assert smooth != pytest.approx(first, abs=1e-6)


def test_frozen_parts_stay_as_they_were(train: Any, tiny: Path) -> None:
    result, _ = train(train_data=mood(), freeze="embeddings,layers.0", weight_decay=0.1)
    before, after = load_file(tiny / "model.safetensors"), load_file(result.run.model / "model.safetensors")
    moved = {name for name, tensor in before.items() if not tensor.equal(after[f"bert.{name}"])}
    assert moved
    assert not [name for name in moved if name.startswith(("embeddings.", "encoder.layer.0."))]


def test_lower_layers_learn_slower_with_layerwise_decay(train: Any, tiny: Path) -> None:
    result, _ = train(train_data=mood(), layerwise_lr_decay=0.1, max_grad_norm=0)
    before, after = load_file(tiny / "model.safetensors"), load_file(result.run.model / "model.safetensors")

    def change(name: str) -> float:
        return float((before[name] - after[f"bert.{name}"]).abs().mean())

    query = "encoder.layer.{}.attention.self.query.weight"
    assert change(query.format(1)) == pytest.approx(10 * change(query.format(0)), rel=0.5)


def test_a_token_budget_fills_batches_by_tokens(train: Any) -> None:
    result, _ = train(train_data=mood(), token_budget=60, max_steps=-1, num_train_epochs=1)
    steps = [e for e in read_journal(result.run.journal_file) if isinstance(e, StepDone)]
    assert all(e.tokens <= 60 for e in steps)
    assert sum(e.examples for e in steps) == 36
    assert len({e.examples for e in steps}) > 1


def test_evaluations_come_at_the_steps_asked_for(train: Any, tmp_path: Path) -> None:
    rows = mood()
    assert evaluations(train(train_data=rows, eval_strategy="steps", eval_steps=2, output_dir=tmp_path / "a")[0]) == [
        2,
        4,
    ]
    result, _ = train(train_data=rows, eval_strategy="no", output_dir=tmp_path / "b")
    assert evaluations(result) == []
    assert result.best_step is None
    assert result.scores["validation"]["accuracy"].n == 4


def test_early_stopping_ends_the_run_and_says_why(train: Any) -> None:
    # Labels that have nothing to do with the text, and no learning: nothing ever improves.
    result, _ = train(
        train_data=mood(), learning_rate=1e-12, max_steps=-1, num_train_epochs=9, early_stopping_patience=2
    )
    end = read_journal(result.run.journal_file)[-1]
    assert isinstance(end, RunEnded)
    assert end.reason == "early_stopping"
    assert evaluations(result) == [5, 10, 15]
    assert result.best_step == 5


def test_the_best_weights_are_exported_and_not_the_last(train: Any) -> None:
    result, _ = train(
        train_data=mood(),
        max_steps=12,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    events = read_journal(result.run.journal_file)
    by_step = {e.step: e.metrics["loss"] for e in events if isinstance(e, Evaluated) and e.split == "validation"}
    best = min(by_step, key=lambda step: by_step[step] or 9.0)
    assert result.best_step == best
    assert result.scores["validation"]["loss"].value == pytest.approx(by_step[best], abs=1e-6)


def test_no_validation_rows_at_all_is_fine_when_asked_for(train: Any) -> None:
    result, said = train(train_data=mood(), validation_split_fraction=0)
    assert result.scores == {}
    assert any("nothing will be evaluated" in note for note in said)
    assert result.run.model.is_dir()


def test_a_finished_run_is_not_written_over(train: Any) -> None:
    train(train_data=mood())
    with pytest.raises(CheckpointError, match="contains a finished run of this config"):
        train(train_data=mood())
    with pytest.raises(CheckpointError, match="contains a finished run of a different config"):
        train(train_data=mood(), seed=7)


def test_time_budget_of_a_single_run_is_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--time_budget requires --recipe best"):
        train(train_data=mood(), time_budget="20m")
    assert not (tmp_path / "run").exists()


def test_python_options_are_checked_like_flags(train: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        train(train_data=mood(), lerning_rate=1e-3)
    with pytest.raises(ConfigError, match="too small"):
        train(train_data=mood(), per_device_train_batch_size=-1)


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An optimizer that is added to the table, as a line of source would add it."""
    monkeypatch.setitem(OPTIMIZERS, "sgd", ("torch.optim:SGD", {"momentum": 0.5}))
    list_options.cache_clear()
    yield "sgd"
    monkeypatch.undo()
    list_options.cache_clear()


def test_an_optimizer_added_to_the_table_trains(train: Any, sgd: str) -> None:
    asked: dict[str, Any] = {"train_data": mood(), "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    result, _ = train(**asked, optim=sgd)
    assert len(losses(result)) == 2
    state = next(result.run.path.glob("checkpoint-*2")) / "optimizer.safetensors"
    assert any("momentum_buffer" in name for name in load_file(state))
