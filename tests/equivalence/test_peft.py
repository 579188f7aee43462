"""Models with PEFT adapters have the same losses, metrics and adapter files with both Trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

import tunesmith
from peft_models import KINDS
from trainer_toys import arguments, arrow, tokenizer

NEAR = 2e-5


def trained(kind: Any, folder: Path, model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = kind(
        model,
        arguments(folder, **{**settings, **options}),
        train_dataset=arrow(40),
        eval_dataset=arrow(17, 1),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", KINDS)
def test_adapters_and_adapter_files_match_transformers(tmp_path: Path, name: str) -> None:
    theirs = trained(transformers.Trainer, tmp_path / "theirs", KINDS[name]())
    ours = trained(tunesmith.Trainer, tmp_path / "ours", KINDS[name]())
    assert ours.label_names == theirs.label_names
    assert set(ours._signature_columns) == set(theirs._signature_columns)
    assert losses(ours) == pytest.approx(losses(theirs), abs=NEAR)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=NEAR)
    if isinstance(ours.model, PeftModel):  # otherwise the rows train without padding
        assert ours.state.total_flos == theirs.state.total_flos
    for place in ("checkpoint-2", "checkpoint-4", "saved"):
        for trainer, side in ((theirs, "theirs"), (ours, "ours")):
            if place == "saved":
                trainer.save_model(str(tmp_path / side / place))
        here, there = tmp_path / "ours" / place, tmp_path / "theirs" / place
        files = {str(f.relative_to(there)) for f in there.rglob("adapter_*")}
        assert files == {str(f.relative_to(here)) for f in here.rglob("adapter_*")}
        assert not list(here.rglob("model.safetensors"))
        for file in files:
            if file.endswith(".json"):
                assert json.loads((here / file).read_text()) == json.loads((there / file).read_text())
            else:
                stored, wanted = load_file(here / file), load_file(there / file)
                assert stored.keys() == wanted.keys()
                assert all(torch.allclose(stored[k], wanted[k], atol=1e-3) for k in wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "weight_decay": 0.1},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_adapter_training_with_options_matches_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = trained(transformers.Trainer, tmp_path / "theirs", KINDS["lora-without-task"](), **options)
    ours = trained(tunesmith.Trainer, tmp_path / "ours", KINDS["lora-without-task"](), **options)
    assert losses(ours) == pytest.approx(losses(theirs), abs=NEAR)
