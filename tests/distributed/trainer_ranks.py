"""One rank of the Trainer tests: training compared with transformers, loaders, logging. Writes the results."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from conftest import tiny_bert, token_lists
from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer, TrainingArguments

ROWS, EVALUATED = 48, 20
LENGTHS = (49, 7, 1)
LEVELS = {
    "info": {"log_level": "info"},
    "both": {"log_level": "debug", "log_level_replica": "debug"},
    "replica": {"log_level": "error", "log_level_replica": "debug"},
    "nobody": {"log_level": "error", "log_level_replica": "error"},
}


def dataset(rows: int, seed: int = 0) -> Any:
    """Return a tokenized Arrow dataset."""
    from datasets import Dataset

    lists = token_lists(rows, seed=seed)
    return Dataset.from_dict({**lists, "attention_mask": [[1] * len(ids) for ids in lists["input_ids"]]})


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row."""
    width = max(len(row["input_ids"]) for row in rows)
    names = ("input_ids", "token_type_ids", "attention_mask")
    out = {n: torch.tensor([row[n] + [0] * (width - len(row[n])) for row in rows]) for n in names}
    return out | {"labels": torch.tensor([row["labels"] for row in rows])}


def accuracy(found: Any) -> dict[str, float]:
    """Return the share of correct predictions."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def make_trainer(folder: Path, *, oracle: bool = False, **options: Any) -> Any:
    """Return a small Trainer: 8 rows per micro-step over all ranks, two micro-steps per step, evaluated every 2 steps."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    given = {
        "per_device_train_batch_size": 8 // world, "gradient_accumulation_steps": 2, "num_train_epochs": 3,
        "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "ddp_timeout": 600,
        "max_grad_norm": 0.1, "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 50,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **(given | options))
    kind = transformers.Trainer if oracle else Trainer
    return kind(
        tiny_bert(), args, data_collator=collate, train_dataset=dataset(ROWS),
        eval_dataset=dataset(EVALUATED, seed=9), compute_metrics=accuracy,
    )  # fmt: skip


def run(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the logs of a Trainer run, and the results of predict and save_model with the best weights."""
    trainer = make_trainer(folder, **options)
    trainer.train()
    predicted = trainer.predict(dataset(EVALUATED, seed=9))
    trainer.save_model(str(folder / "exported"))
    history = trainer.state.log_history
    return {
        "losses": [line["loss"] for line in history if "loss" in line],
        "norms": [line["grad_norm"] for line in history if "grad_norm" in line],
        "eval_losses": [line["eval_loss"] for line in history if "eval_loss" in line],
        "best": [trainer.state.best_global_step, Path(trainer.state.best_model_checkpoint or "").name],
        "steps": trainer.state.global_step,
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
    }


def resume(folder: Path, **options: Any) -> list[float]:
    """Resume an existing run from step 4 and return its losses."""
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    return [line["loss"] for line in trainer.state.log_history if "loss" in line and line["step"] > 4]


class Numbers(torch.utils.data.Dataset[Any]):
    """Dataset in which row i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return i


class Dice(Numbers):
    """Dataset of random numbers from three generators."""

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([random.random(), np.random.random(), torch.rand([]).item()])}


class Echo(nn.Module):
    """Model that returns its input; its weights are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return input_ids if labels is None else (torch.tensor(0.0), input_ids)


class Looker(nn.Module):
    """Model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.shown: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.shown.append(x.tolist())
        y = x @ self.weight
        return y.mean(), y


def stack(rows: list[int]) -> dict[str, torch.Tensor]:
    """Return a batch of numbers, with the same numbers as labels."""
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}


def in_order(folder: Path, length: int, moved: int | None) -> list[bool]:
    """Return whether evaluate and predict see every number once, in order."""

    def judge(p: Any) -> dict[str, bool]:
        return {"right": p.predictions.tolist() == p.label_ids.tolist() == list(range(length))}

    trainer = Trainer(
        Echo(),
        arguments(folder, eval_accumulation_steps=moved),
        data_collator=stack,
        eval_dataset=Numbers(length),
        compute_metrics=judge,
    )
    return [trainer.evaluate()["eval_right"], trainer.predict(Numbers(length)).metrics["test_right"]]


def said(folder: Path, options: dict[str, Any]) -> int:
    """Return how often this rank logs the start of a run."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    Trainer(Regression(), arguments(folder, max_steps=1, **options), train_dataset=RegressionDataset()).train()
    logger.removeHandler(handler)
    return sum("Running training" in text for text in heard)


def main() -> None:
    """Run all cases, then write `<out>-<rank>.json`."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found: dict[str, Any] = {
        "ddp": run(out.parent / "ddp"),
        "ddp oracle": run(out.parent / "ddp-oracle", oracle=True),
        "resumed": resume(out.parent / "ddp"),
        **{str(n): [in_order(out.parent, n, moved) for moved in (None, 2)] for n in LENGTHS},
        "said": {name: said(out.parent / name, options) for name, options in LEVELS.items()},
    }
    model = Looker()
    Trainer(
        model, arguments(out.parent / "dice", max_steps=3, dataloader_num_workers=2), train_dataset=Dice(64)
    ).train()
    found["shown"] = model.shown
    Path(f"{out}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
