"""One rank of the tests of a Trainer's loaders and logs: rows that are plain numbers, random rows, how much a rank says."""

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
from torch import nn

from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer

LENGTHS = (49, 7, 1)
LEVELS = {
    "info": {"log_level": "info"},
    "both": {"log_level": "debug", "log_level_replica": "debug"},
    "replica": {"log_level": "error", "log_level_replica": "debug"},
    "nobody": {"log_level": "error", "log_level_replica": "error"},
}


class Numbers(torch.utils.data.Dataset[Any]):
    """Row i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return i


class Dice(Numbers):
    """Rows drawn from three generators."""

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([random.random(), np.random.random(), torch.rand([]).item()])}


class Echo(nn.Module):
    """Gives its input back; its weights have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return input_ids if labels is None else (torch.tensor(0.0), input_ids)


class Looker(nn.Module):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.shown: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.shown.append(x.tolist())
        y = x @ self.weight
        return y.mean(), y


def stack(rows: list[int]) -> dict[str, torch.Tensor]:
    """A batch of numbers with themselves as labels."""
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}


def in_order(folder: Path, length: int, moved: int | None) -> list[bool]:
    """Whether evaluate and predict see every number once, in order."""

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
    """How many times this rank announces a run."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    Trainer(Regression(), arguments(folder, max_steps=1, **options), train_dataset=RegressionDataset()).train()
    logger.removeHandler(handler)
    return sum("Running training" in text for text in heard)


def main() -> None:
    """All cases, then `<out>-<rank>.json`."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found: dict[str, Any] = {str(n): [in_order(out.parent, n, m) for m in (None, 2)] for n in LENGTHS}
    model = Looker()
    options = {"max_steps": 3, "dataloader_num_workers": 2}
    Trainer(model, arguments(out.parent / "dice", **options), train_dataset=Dice(64)).train()
    found["shown"] = model.shown
    found["said"] = {name: said(out.parent / name, options) for name, options in LEVELS.items()}
    Path(f"{out}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
