"""An output folder that holds a person's files: a Trainer writes beside them, and never over them."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from trainer_toys import PretrainedRegression, RegressionConfig, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.errors import ResourceError
from tunesmith.events import Note
from tunesmith.runs.event_log import read_journal


def make(folder: Path, *, callbacks: Any = None, **options: Any) -> Any:
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_total_limit": 1}
    return Trainer(
        PretrainedRegression(RegressionConfig()),
        arguments(folder, **{**defaults, **options}),
        train_dataset=RegressionDataset(),
        callbacks=callbacks,
    )


def write(folder: Path, *names: str) -> dict[str, str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return {name: f"mine: {name}" for name in names}


def read(folder: Path, names: Any) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in names}


def test_results_are_written_beside_a_persons_files_of_that_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = write(
        tmp_path,
        *("README.md", "train_results.json", "all_results.json", "trainer_state.json", "run.yaml", "metrics.json"),
        *("model/x.bin", "best/x.bin", "checkpoint-9/x.bin", "notes.txt"),
    )
    trainer = make(tmp_path)
    metrics = trainer.train().metrics
    with caplog.at_level(logging.WARNING, "tunesmith"):
        for _ in range(2):
            trainer.save_metrics("train", metrics)
            trainer.save_metrics("eval", {"eval_loss": 1.0})
            trainer.save_state()
            trainer.create_model_card()
            trainer.save_model()
    assert read(tmp_path, mine) == mine
    assert (
        f"{tmp_path}/README.md was not written by tunesmith and is left alone; see README.tunesmith.md" in caplog.text
    )
    assert json.loads((tmp_path / "all_results.tunesmith.json").read_text())["eval_loss"] == 1.0
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 1.0}
    assert (tmp_path / "train_results.tunesmith.json").is_file()
    assert json.loads((tmp_path / "trainer_state.tunesmith.json").read_text())["global_step"] == 4
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-9"]
    assert not list(tmp_path.glob(".tmp-*"))
    again = make(tmp_path)
    again.save_metrics("eval", {"eval_loss": 2.0})  # another process: its own file of before is replaced
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 2.0}
    assert PretrainedRegression.from_pretrained(tmp_path).a.item() == trainer.model.a.item()


def test_a_model_that_the_trainer_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    PretrainedRegression(RegressionConfig()).save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    trainer = make(tmp_path)
    with pytest.raises(ResourceError, match=r"holds config.json, model.safetensors, which this Trainer did not write"):
        trainer.save_model()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    trainer.save_model(str(tmp_path / "new"))
    trainer.save_model(str(tmp_path / "new"))
    assert (tmp_path / "new" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "training_args.json"])
def test_a_model_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    trainer = make(tmp_path / "run")
    trainer.save_model()
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ResourceError, match=name):
        trainer.save_model()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "run" / name).is_symlink()


def test_a_model_card_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    trainer = make(tmp_path / "run")
    (tmp_path / "run" / "README.md").symlink_to(tmp_path / "mine.txt")
    trainer.create_model_card()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "run" / "README.tunesmith.md").is_file()


@pytest.mark.parametrize("name", ["checkpoint-2/x.bin", "journal.jsonl", ".lock"])
def test_a_persons_file_where_a_run_would_write_is_refused_before_the_first_step(tmp_path: Path, name: str) -> None:
    mine = write(tmp_path, name, "notes.txt")
    with pytest.raises(ResourceError, match=name.split("/")[0]):
        make(tmp_path).train()
    assert read(tmp_path, mine) == mine


def test_rotation_removes_only_checkpoints_of_this_run(tmp_path: Path) -> None:
    make(tmp_path, max_steps=1, save_steps=1).train()
    mine = write(tmp_path, "checkpoint-1/notes.txt", "checkpoint-7/x.bin")
    trainer = make(tmp_path, max_steps=6)
    trainer.train()
    assert read(tmp_path, mine) == mine
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-6", "checkpoint-7"]


def test_a_note_in_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    class Annotate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                write(tmp_path, "checkpoint-2/notes.txt")

    make(tmp_path, callbacks=[Annotate()]).train()
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "mine: checkpoint-2/notes.txt"


class Swap(TrainerCallback):
    """Does something to the output folder after the first step."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != 1:
            return
        if self.how == "journal removed":
            (self.folder / "journal.jsonl").unlink()
            return
        if self.how == "removed":
            shutil.rmtree(self.folder)
        else:
            os.rename(self.folder, self.folder.with_name("moved"))
        if self.how == "linked":
            self.folder.symlink_to(self.folder.with_name("mine"))
        elif self.how == "made again":
            self.folder.mkdir()


@pytest.mark.parametrize("how", ["removed", "renamed", "linked", "made again", "journal removed"])
def test_an_output_folder_that_is_no_longer_there_ends_the_run_at_the_next_save(tmp_path: Path, how: str) -> None:
    (tmp_path / "mine").mkdir()
    trainer = make(tmp_path / "run", callbacks=[Swap(tmp_path / "run", how)])
    with pytest.raises(ResourceError, match="was removed, renamed or replaced while the run wrote to it"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_journal_that_is_gone_is_told_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2).train()
    (tmp_path / "journal.jsonl").unlink()
    with caplog.at_level(logging.WARNING, "tunesmith"):
        make(tmp_path, max_steps=4, num_train_epochs=1).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "journal.jsonl was gone" in caplog.text
    assert any(isinstance(e, Note) and "was gone" in e.text for e in read_journal(tmp_path / "journal.jsonl"))
