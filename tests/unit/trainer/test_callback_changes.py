"""Checkpoints that a callback changes after they were written: sealed anew and reported; the run goes on, and says what it is."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from conftest import tiny_bert
from peft_models import KINDS
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.errors import CheckpointError
from tunesmith.events import Note
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.manifest import verify

Change = Callable[[Path, Any], None]


class OnSave(TrainerCallback):
    """Changes each checkpoint as soon as it is there."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.change(Path(args.output_dir) / f"checkpoint-{state.global_step}", model)


def save_model(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


def save_in_shards(folder: Path, model: Any) -> None:
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")


def start_anew(folder: Path, model: Any) -> None:
    shutil.rmtree(folder)
    model.save_pretrained(folder)


def in_half(folder: Path, model: Any) -> None:
    half = {n: t.half() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})


def without_optimizer(folder: Path, model: Any) -> None:
    (folder / "optimizer.safetensors").unlink()


def with_a_note(folder: Path, model: Any) -> None:
    (folder / "notes.txt").write_text("mine")


def gone(folder: Path, model: Any) -> None:
    shutil.rmtree(folder)


def make(folder: Path, change: Change | None = None, *, kind: Any = Trainer, model: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    return kind(
        tiny_bert(dropout=0.1) if model is None else model,
        arguments(folder, **{**settings, **options}),
        train_dataset=arrow(30),
        eval_dataset=arrow(9, 1),
        processing_class=tokenizer(),
        callbacks=None if change is None else [OnSave(change)],
    )


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}


@pytest.mark.parametrize("change", [save_model, save_in_shards, with_a_note], ids=lambda change: change.__name__)
def test_a_checkpoint_that_still_holds_the_state_is_sealed_anew_and_resumes_exactly(
    tmp_path: Path, change: Change, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        whole = make(tmp_path / "whole", change, save_total_limit=2, **BEST)
        whole.train()
    if change is not save_model:  # which writes the same bytes again
        assert "was changed by a callback and is sealed as it is now" in caplog.text
    assert "not exact" not in caplog.text
    verify(tmp_path / "whole" / "checkpoint-2")
    again = make(tmp_path / "again", **BEST)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected, got = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(got[n], expected[n]) for n in expected)


def test_weights_that_a_callback_replaced_are_used_and_the_resume_says_so(tmp_path: Path, caplog: Any) -> None:
    make(tmp_path, in_half, **BEST).train()
    verify(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-4")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make(tmp_path, max_steps=3, **BEST).train(resume_from_checkpoint=True)
    assert "not an exact resume: model.safetensors of" in caplog.text
    notes = [event.text for event in read_journal(tmp_path / "journal.jsonl") if isinstance(event, Note)]
    assert any("was changed by a callback" in text for text in notes)


@pytest.mark.parametrize("change", [without_optimizer, start_anew], ids=lambda change: change.__name__)
def test_a_checkpoint_without_its_optimizer_serves_as_the_best_one_and_is_refused_by_a_resume(
    tmp_path: Path, change: Change
) -> None:
    trainer = make(tmp_path, change, **BEST)
    trainer.train()
    assert trainer.state.global_step == 4
    verify(tmp_path / "checkpoint-4")
    with pytest.raises(CheckpointError, match=r"has no (optimizer|generators)\.safetensors|has no state\.json"):
        make(tmp_path / "again", **BEST).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_checkpoint_that_a_callback_removed_is_reported_at_the_end(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        make(tmp_path, gone, **BEST).train()
    assert get_last_checkpoint(str(tmp_path)) is None
    assert "Could not locate the best model" in caplog.text


def test_a_best_checkpoint_that_changed_later_is_loaded_when_its_weights_are_intact(
    tmp_path: Path, caplog: Any
) -> None:
    class AtTheEnd(TrainerCallback):
        """Changes the checkpoints in the last step, after all of them were saved."""

        def __init__(self, name: str) -> None:
            self.name = name

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "train_loss" in logs:
                for folder in Path(args.output_dir).glob("checkpoint-*"):
                    (folder / self.name).write_bytes(b"other")

    trainer = make(tmp_path / "a", **BEST)
    trainer.add_callback(AtTheEnd("optimizer.safetensors"))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "its weights are intact and used as the best" in caplog.text
    trainer = make(tmp_path / "b", **BEST)
    trainer.add_callback(AtTheEnd("model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has 5 bytes"):
        trainer.train()


def test_adapters_saved_again_by_a_callback_are_sealed_anew(tmp_path: Path) -> None:
    make(tmp_path, save_model, model=KINDS["several-adapters"](), **BEST).train()
    verify(tmp_path / "checkpoint-2")
    make(tmp_path / "again", model=KINDS["several-adapters"]()).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )


def test_weights_cut_into_shards_after_the_run_resume_exactly_and_other_weights_do_not(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-2"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}

    def write() -> None:
        for file, held in parts.items():
            save_file({n: weights[n] for n in held}, folder / file, metadata={"format": "pt"})

    write()
    index = {"metadata": {}, "weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    again = make(tmp_path / "again")
    again.train(resume_from_checkpoint=str(folder))
    expected, got = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-4")
    make(tmp_path / "whole").train(resume_from_checkpoint=True)

    weights[names[0]][0] += 1e-6
    write()
    with pytest.raises(CheckpointError, match=r"not those of the model\.safetensors that was written"):
        make(tmp_path / "other").train(resume_from_checkpoint=str(folder))
    index["weight_map"][names[0]] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="shards cannot be read"):
        make(tmp_path / "other").train(resume_from_checkpoint=str(folder))


def test_the_config_of_a_checkpoint_is_the_one_of_transformers(tmp_path: Path) -> None:
    for name, kind in (("ours", Trainer), ("theirs", transformers.Trainer)):
        make(tmp_path / name, kind=kind).train()
    ours, theirs = (json.loads((tmp_path / n / "checkpoint-2" / "config.json").read_text()) for n in ("ours", "theirs"))
    assert ours["architectures"] == ["BertForSequenceClassification"]
    assert ours == theirs
