"""Checkpoints of a Trainer: transformers' names, exact resume, reported damage, and the best model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from trainer_toys import (
    Accuracy,
    Noisy,
    PretrainedRegression,
    Recorder,
    Regression,
    RegressionConfig,
    RegressionDataset,
    Stream,
    arguments,
    lasting,
    weights_of,
)
from tunesmith import Trainer
from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import Evaluated, Note, RowsEvaluated, StepDone
from tunesmith.runs.event_log import read_journal


def make(
    folder: Path, *, model: Any = None, kind: Any = Trainer, data: Any = None, callbacks: Any = None, **options: Any
) -> Any:
    defaults = {
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
    }
    return kind(
        Noisy() if model is None else model,
        arguments(folder, **{**defaults, **options}),
        train_dataset=RegressionDataset(length=46) if data is None else data,
        eval_dataset=RegressionDataset(length=20, seed=1),
        callbacks=callbacks,
        compute_metrics=Accuracy(),
    )


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=8, shuffle=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
        {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"},
        {"eval_strategy": "epoch", "metric_for_best_model": "loss", "optim": "sgd", "logging_steps": 5},
        {"kind": OwnLoader},
        {"data": "stream", "max_steps": 14, "num_train_epochs": 1},
        {"train_sampling_strategy": "sequential", "lr_scheduler_type": "cosine", "warmup_steps": 3},
    ],
    ids=["plain", "accumulation", "plateau", "epoch-evaluation", "own-loader", "stream", "cosine"],
)
def test_resume_from_any_checkpoint_is_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    def new(folder: Path) -> Any:
        data = Stream(46) if options.get("data") == "stream" else None
        return make(folder, **{**options, "data": data})

    whole = new(tmp_path / "whole")
    whole.train()
    expected, history = weights_of(whole), lasting(whole.state.log_history)
    last = whole.state.global_step
    assert last > 7
    for step in range(1, last):
        again = new(tmp_path / f"from-{step}")
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert (again.state.global_step, again.state.total_flos) == (last, whole.state.total_flos)
        got = weights_of(again)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in expected), step
        assert lasting(again.state.log_history) == history, step


def test_interrupted_run_logs_every_step_once(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                raise RuntimeError("the machine went away")

    whole = make(tmp_path / "whole", eval_strategy="epoch")
    whole.train()
    with pytest.raises(RuntimeError, match="went away"):
        make(tmp_path / "broken", eval_strategy="epoch", callbacks=[Stop()], save_steps=3).train()
    again = make(tmp_path / "broken", eval_strategy="epoch", save_steps=3)
    again.train(resume_from_checkpoint=True)
    expected, got = weights_of(whole), weights_of(again)
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    events = read_journal(tmp_path / "broken" / "journal.jsonl")
    assert [e.step for e in events if isinstance(e, StepDone)] == list(range(1, 13))
    assert [e.step for e in events if isinstance(e, Evaluated)] == [6, 12]
    unbroken = read_journal(tmp_path / "whole" / "journal.jsonl")
    rows = [e for e in events if isinstance(e, RowsEvaluated)]
    assert [e.step for e in rows] == [6, 12]
    assert rows == [e for e in unbroken if isinstance(e, RowsEvaluated)]


def test_checkpoint_has_expected_files_and_no_pickle(tmp_path: Path) -> None:
    make(tmp_path, model=PretrainedRegression(RegressionConfig(a=1)), save_steps=5).train()
    folder = Path(get_last_checkpoint(str(tmp_path)))
    names = {p.name for p in folder.iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json", "training_args.json", "MANIFEST.json"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pth", ".pkl"))]
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], len(state["log_history"])) == (12, 6)
    assert torch.isfinite(PretrainedRegression.from_pretrained(folder).a)


def test_resume_without_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No valid checkpoint found in output directory"):
        make(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5-bogus"))


def test_damaged_checkpoint_is_skipped_or_refused_if_named(tmp_path: Path) -> None:
    make(tmp_path).train()
    file = tmp_path / "checkpoint-12" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="sha256"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    recorder = Recorder()
    again = make(tmp_path, callbacks=[recorder])
    again.train(resume_from_checkpoint=True)
    assert recorder.events.count("on_step_end") == 1


def test_weights_split_into_shards_are_verified(tmp_path: Path) -> None:
    make(tmp_path, max_steps=3).train()
    folder = tmp_path / "checkpoint-2"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    names = {name: f"{name}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    make(tmp_path / "again", max_steps=3).train(resume_from_checkpoint=str(folder))
    (folder / "model.safetensors").unlink()
    save_file({"inner.bias": torch.zeros(8)}, folder / "inner.bias.safetensors")
    with pytest.raises(CheckpointError, match="sha256"):
        make(tmp_path / "again", max_steps=3).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("option", [{"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2}])
def test_resume_with_changed_batch_size_warns_and_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    make(tmp_path, max_steps=2).train()
    expected = f"the batch size of a step was 8 and is {4 if 'per_device_train_batch_size' in option else 16}"
    again = make(tmp_path, max_steps=4, **option)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert f"Not an exact resume: {expected}" in caplog.text
    assert expected in [e.text for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e, Note)]


def test_resume_with_different_accumulation_sees_same_rows(tmp_path: Path) -> None:
    ends = []
    for name, option in (("1", {}), ("2", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})):
        make(tmp_path / name, model=Regression(), max_steps=5).train()
        again = make(tmp_path / name, model=Regression(), max_steps=5, **option)
        again.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-3"))
        ends.append([float(p.detach()) for p in again.model.parameters()])
    assert ends[1] == pytest.approx(ends[0], abs=1e-5)


def test_event_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    make(tmp_path, max_steps=3).train()
    file = tmp_path / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"step": 3' not in line))
    with pytest.raises(CheckpointError, match="steps 3 to 3 are missing"):
        make(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_different_library_version_warns_and_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.trainer import identity

    versions = identity.package_versions()
    monkeypatch.setattr(identity, "package_versions", lambda: {**versions, "torch": "1.0"})
    make(tmp_path, max_steps=2).train()
    monkeypatch.setattr(identity, "package_versions", lambda: versions)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        make(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    said = f"torch was 1.0 and is {versions['torch']}"
    assert said in caplog.text
    notes = [e.text for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e, Note)]
    assert notes[1:3] == [said, "max_steps was 2 and is 4"]


class Growing(torch.nn.Module):
    """Records the rows it saw in a growing buffer, which it can load."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.register_buffer("seen", torch.empty(0))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict)

    def forward(self, input_x: torch.Tensor, labels: Any = None) -> Any:
        self.seen = torch.cat([self.seen, input_x.detach()])
        y = self.line(input_x[:, None])[:, 0]
        return (y,) if labels is None else (torch.nn.functional.mse_loss(y, labels), y)


def test_resumed_run_sees_the_same_examples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = make(tmp_path / "whole", model=Growing())
    whole.train()
    again = make(tmp_path / "again", model=Growing())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-7"))
    assert torch.equal(whole.model.seen, again.model.seen)
    rows = RegressionDataset(length=46).x
    assert sorted(whole.model.seen[:46].tolist()) == sorted(rows.tolist())


def test_resume_accepts_more_epochs(tmp_path: Path) -> None:
    make(tmp_path, lr_scheduler_type="constant").train()
    longer = make(tmp_path, num_train_epochs=3, lr_scheduler_type="constant")
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 18
    assert longer.state.epoch == 3


def test_transformers_checkpoint_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not written by tunesmith.*from_pretrained"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_weights_only_checkpoint_loads_but_does_not_resume(tmp_path: Path) -> None:
    make(tmp_path, model=Regression(), save_only_model=True, max_steps=2).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        make(tmp_path, model=Regression()).train(resume_from_checkpoint=True)


def test_second_run_in_a_folder_resumes_its_own_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, save_steps=4).train()
    make(tmp_path, save_steps=3, max_steps=5).train()
    recorder = Recorder()
    again = make(tmp_path, save_steps=100, max_steps=5, callbacks=[recorder])
    again.train(resume_from_checkpoint=True)
    assert recorder.events.count("on_step_end") == 0
    assert again.state.global_step == 5


def test_output_folder_with_different_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"base model")
    recorder = Recorder()
    with pytest.raises(ResourceError, match=r"contains model\.safetensors"):
        make(tmp_path, callbacks=[recorder]).train()
    assert "on_train_begin" not in recorder.events


def test_save_model_after_training_writes_into_any_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"base model")
    trainer = make(tmp_path / "run", max_steps=2)
    trainer.train()
    trainer.save_model(str(base))
    assert load_file(base / "model.safetensors").keys() == trainer.model.state_dict().keys()
