"""Row 14 for the Trainer: changes between a stop and a resume are refused by name or reported, or have no effect."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from transformers import DataCollatorWithPadding, TrainerCallback

from conftest import tiny_bert
from peft_models import lora
from trainer_toys import Regression, RegressionDataset, arguments, arrow, tokenizer
from tunesmith.errors import CheckpointError, DataError
from tunesmith.trainer import Trainer

ROWS = 64


class Stop(TrainerCallback):
    """Callback that ends the run in the middle of its second epoch, after a checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class Pairs(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return {"input_x": self.tensors[0][index], "labels": self.tensors[1][index]}


def line(slope: float = 2.0, rows: int = ROWS) -> list[dict[str, Any]]:
    x = np.linspace(-1, 1, rows)
    return [{"input_x": float(v), "labels": float(slope * v)} for v in x]


def toy(folder: Path, data: Any, **options: Any) -> Any:
    """Return a Trainer of a toy model: 24 steps of 4 rows, with a checkpoint after 20."""
    given = {"max_steps": 24, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 20, **options}
    return Trainer(Regression(), arguments(folder, **given), train_dataset=data)


def stopped(make: Callable[[], Any]) -> None:
    trainer = make()
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.global_step == 20


def encoded(flip: int | None = None) -> Any:
    rows = arrow(ROWS)
    if flip is not None:
        labels = list(rows["label"])
        labels[flip] = 1 - labels[flip]
        rows = rows.remove_columns("label").add_column("label", labels)
    return rows


def with_token(rows: Any, index: int) -> Any:
    ids = [list(r) for r in rows["input_ids"]]
    ids[index][1] += 1
    return rows.remove_columns("input_ids").add_column("input_ids", ids)


def bert(folder: Path, **changed: Any) -> Any:
    """Return a Trainer of a tiny BERT on Arrow rows, 24 steps; defaults match the stopped run."""
    given: dict[str, Any] = {
        "max_steps": 24,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 20,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 2.0},
        "eval_strategy": "steps",
        "eval_steps": 10,
        **changed.pop("args", {}),
    }
    words = changed.pop("tokenizer", None) or tokenizer()
    parts = {
        "model": tiny_bert(),
        "train_dataset": encoded(),
        "eval_dataset": arrow(8, seed=3),
        "processing_class": words,
        "data_collator": DataCollatorWithPadding(words),
        **changed,
    }
    return Trainer(args=arguments(folder, **given), **parts)


def swapped_words() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inner = json.loads(tokenizer().backend_tokenizer.to_str())
    words = inner["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    core = Tokenizer.from_str(json.dumps(inner))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


def left_padding() -> Any:
    words = tokenizer()
    words.padding_side = "left"
    return words


def changed_model(alter: Callable[[Any], Any], **options: Any) -> Any:
    model = tiny_bert(**options)
    alter(model)
    return model


def named(model: Any) -> Any:
    model.config.id2label = {0: "yes", 1: "no"}


def collator(**options: Any) -> dict[str, Any]:
    return {"data_collator": DataCollatorWithPadding(tokenizer(), **options)}


DATA: dict[str, Callable[[Any], Any]] = {
    "one label flipped": lambda rows: encoded(17),
    "one token edited": lambda rows: with_token(rows, 5),
    "rows permuted by indices": lambda rows: rows.shuffle(seed=1),
    "rows selected": lambda rows: rows.select(range(ROWS - 1)),
    "another format": lambda rows: rows.with_format("torch", columns=["input_ids", "attention_mask", "label"]),
}
MODELS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: tiny_bert(dropout=0.1),
    "layers": lambda: tiny_bert(layers=1),
    "a module replaced": lambda: changed_model(lambda m: setattr(m, "dropout", torch.nn.Dropout(0.3))),
    "a frozen part": lambda: changed_model(lambda m: m.bert.embeddings.requires_grad_(False)),
}
SETTINGS: dict[str, Any] = {
    "seed": 7, "data_seed": 7, "learning_rate": 2e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9,
    "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "lr_scheduler_kwargs": {"power": 3.0}, "warmup_steps": 3,
    "optim": "sgd", "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "dataloader_drop_last": True,
    "train_sampling_strategy": "sequential", "bf16": True,
}  # fmt: skip
COSINE = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {}}
BERT: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    **{
        name: (lambda change=change: {"train_dataset": change(encoded())}, "the training data changed")
        for name, change in DATA.items()
    },
    **{name: (lambda make=make: {"model": make()}, "the model changed") for name, make in MODELS.items()},
    "label names": (lambda: {"model": changed_model(named)}, "the labels were"),
    "tokenizer: ids swapped": (lambda: {"tokenizer": swapped_words()}, "the tokenizer changed"),
    "tokenizer: padding side": (lambda: {"tokenizer": left_padding()}, "the tokenizer changed"),
    "collator: multiple of 8": (lambda: collator(pad_to_multiple_of=8), "the collator changed"),
    "collator: to a length": (lambda: collator(padding="max_length", max_length=32), "the collator changed"),
    **{
        name: (lambda name=name, value=value: {"args": {name: value}}, f"{name} was")
        for name, value in SETTINGS.items()
    },
    "schedule": (lambda: {"args": COSINE}, "lr_scheduler_type was 'polynomial' and is 'cosine'"),
}


@pytest.fixture(scope="module")
def bert_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    stopped(lambda: bert(folder))
    return folder


@pytest.mark.parametrize("kind", BERT)
def test_change_before_a_trainer_resume_is_refused(kind: str, bert_run: Path) -> None:
    change, says = BERT[kind]
    before = (bert_run / "journal.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=says):
        bert(bert_run, **change()).train(resume_from_checkpoint=True)
    assert (bert_run / "journal.jsonl").read_bytes() == before


def test_different_initial_weights_have_no_effect(bert_run: Path, tmp_path: Path) -> None:
    ends = []
    for name, seed in (("same", 0), ("other", 9)):
        shutil.copytree(bert_run, tmp_path / name)
        trainer = bert(tmp_path / name, model=tiny_bert(seed))
        trainer.train(resume_from_checkpoint=True)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_frozen_weights_below_adapters_are_compared(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        base = tiny_bert(seed)
        torch.manual_seed(0)
        return bert(tmp_path, model=get_peft_model(base, lora(task_type="SEQ_CLS")))

    stopped(lambda: make(0))
    with pytest.raises(CheckpointError, match="the model changed"):
        make(9).train(resume_from_checkpoint=True)
    make(0).train(resume_from_checkpoint=True)


def test_different_evaluation_data_is_reported(bert_run: Path, tmp_path: Path) -> None:
    shutil.copytree(bert_run, tmp_path / "run")
    bert(tmp_path / "run", eval_dataset=arrow(8, seed=4)).train(resume_from_checkpoint=True)
    assert "the evaluation data changed" in (tmp_path / "run" / "journal.jsonl").read_text()


def edited(rows: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [{**r, "labels": r["labels"] + 1.0} if i == index else r for i, r in enumerate(rows)]


def one_row(data: RegressionDataset) -> RegressionDataset:
    data.x[13] += 1
    return data


def pairs(rows: list[dict[str, Any]]) -> Pairs:
    return Pairs(*(torch.tensor([r[n] for r in rows]) for n in ("input_x", "labels")))


OPAQUE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "torch Dataset, one row": (RegressionDataset, lambda: one_row(RegressionDataset())),
    "list, one row": (line, lambda: edited(line(), 3)),
    "TensorDataset, one value": (lambda: pairs(line()), lambda: pairs(edited(line(), 60))),
    "Subset, a row below": (
        lambda: Subset(RegressionDataset(length=ROWS), list(range(ROWS))),
        lambda: Subset(one_row(RegressionDataset(length=ROWS)), list(range(ROWS))),
    ),
    "ConcatDataset, turned": (
        lambda: ConcatDataset([RegressionDataset(length=32), RegressionDataset(length=32, seed=1)]),
        lambda: ConcatDataset([RegressionDataset(length=32, seed=1), RegressionDataset(length=32)]),
    ),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_different_rows_in_memory_are_refused(kind: str, tmp_path: Path) -> None:
    first, second = OPAQUE[kind]
    stopped(lambda: toy(tmp_path, first()))
    with pytest.raises(CheckpointError, match="the training data"):
        toy(tmp_path, second()).train(resume_from_checkpoint=True)
    again = toy(tmp_path, first())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 24


def test_longer_training_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(lambda: toy(tmp_path, RegressionDataset()))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        toy(tmp_path, RegressionDataset(), max_steps=25).train(resume_from_checkpoint=True)
    assert "Not an exact resume: max_steps was 24 and is 25" in caplog.text
    assert "max_steps was 24 and is 25" in (tmp_path / "journal.jsonl").read_text()


def test_label_without_a_class_is_named_before_training(tmp_path: Path) -> None:
    rows = arrow(16)
    labels = [5 if i == 11 else v for i, v in enumerate(rows["label"])]
    bad = rows.remove_columns("label").add_column("label", labels)
    steps: list[int] = []

    class Count(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    with pytest.raises(DataError, match="row 11, label: the label is 5, but the model has 2 classes"):
        bert(tmp_path, train_dataset=bad, callbacks=[Count()]).train()
    assert steps == []
    ignored = [-100 if label == 5 else label for label in labels]
    bert(tmp_path, train_dataset=rows.remove_columns("label").add_column("label", ignored)).train()


@pytest.mark.parametrize("empty", [[], arrow(4).select([])], ids=["list", "arrow"])
def test_empty_training_set_is_an_error(empty: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the train_dataset has no rows"):
        bert(tmp_path, train_dataset=empty).train()
