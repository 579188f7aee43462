"""Checkpoints of a Trainer with PEFT adapters: verified adapter folders, exact resume, best adapter loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model
from safetensors.torch import load_file

from conftest import tiny_bert
from peft_models import ATTENTION, KINDS, adapted, lora
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.errors import CheckpointError
from tunesmith.runs.folder import verify


def make(folder: Path, model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    return Trainer(
        model,
        arguments(folder, **{**settings, **options}),
        train_dataset=arrow(30),
        eval_dataset=arrow(17, 1),
        processing_class=tokenizer(),
    )


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    out = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    for index, values in enumerate(trainer.optimizer.state.values()):
        out |= {f"{index}.{k}": v.clone() for k, v in values.items()}
    return out


@pytest.mark.parametrize("name", KINDS)
def test_adapter_run_resumes_bit_identically(tmp_path: Path, name: str) -> None:
    whole = make(tmp_path / "whole", KINDS[name](), save_steps=3)
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-3"
    verify(folder)
    stored = {key for file in folder.rglob("*.safetensors") for key in load_file(file)}
    assert not [key for key in stored if key.endswith(("word_embeddings.weight", "intermediate.dense.weight"))]
    assert not list(folder.rglob("model.safetensors"))
    again = make(tmp_path / "again", KINDS[name](), save_steps=3)
    again.train(resume_from_checkpoint=str(folder))
    expected, got = everything(whole), everything(again)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", ["lora", "prompt-encoder", "unfrozen-by-hand", "several-adapters"])
@pytest.mark.parametrize("save_only_model", [False, True])
def test_best_adapters_are_loaded_at_the_end(tmp_path: Path, name: str, save_only_model: bool) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make(tmp_path, KINDS[name](), save_only_model=save_only_model, learning_rate=0.3, **best)
    trainer.train()
    measured = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert measured[-1] < max(measured), "the best must not be the last"
    assert trainer.evaluate()["eval_loss"] == max(measured)


def test_peft_loads_and_merges_adapter_checkpoint(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_bert().save_pretrained(base)
    trainer = make(tmp_path / "run", get_peft_model(type(tiny_bert()).from_pretrained(base), lora(task_type="SEQ_CLS")))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    expected = trainer.predict(arrow(17, 1)).predictions
    for folder in (tmp_path / "run" / "checkpoint-5", tmp_path / "saved"):
        loaded = PeftModel.from_pretrained(type(tiny_bert()).from_pretrained(base), folder)
        by_its_config = AutoPeftModelForSequenceClassification.from_pretrained(folder)
        for model in (loaded, by_its_config, loaded.merge_and_unload()):
            other = make(tmp_path / "other", model)
            assert torch.allclose(
                torch.tensor(other.predict(arrow(17, 1)).predictions), torch.tensor(expected), atol=1e-6
            )


def test_adapter_checkpoint_is_refused_by_different_model(tmp_path: Path) -> None:
    make(tmp_path / "run", KINDS["lora"](), max_steps=2).train()
    folder = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(CheckpointError, match="adapters was True and is False; the model changed"):
        make(tmp_path / "plain", tiny_bert()).train(resume_from_checkpoint=folder)

    def resume(name: str, model: Any) -> None:
        trainer = make(tmp_path / name, model)
        trainer.allow_changed_data = True
        trainer.train(resume_from_checkpoint=folder)

    with pytest.raises(CheckpointError, match=r"has no model\.safetensors.*contains PEFT adapters"):
        resume("plain", tiny_bert())
    with pytest.raises(CheckpointError, match="does not fit the model"):
        resume("rank", adapted(lora(task_type="SEQ_CLS", r=2)))
    with pytest.raises(CheckpointError):
        resume("fewer", adapted(lora(task_type="SEQ_CLS", target_modules=ATTENTION[:1])))
    with pytest.raises(CheckpointError, match=r"has no second/adapter_model\.safetensors"):
        resume("more", KINDS["several-adapters"]())


def test_damaged_adapter_checkpoint_is_skipped(tmp_path: Path) -> None:
    make(tmp_path, KINDS["lora"](), max_steps=3).train()
    file = tmp_path / "checkpoint-3" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        make(tmp_path, KINDS["lora"]()).train(resume_from_checkpoint=str(file.parent))
    shutil.rmtree(tmp_path / "checkpoint-1")
    again = make(tmp_path, KINDS["lora"](), max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
