"""Toy regression: y = a*x + b, a model with two parameters, and a recorder of callback events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from conftest import token_lists


class RegressionDataset(Dataset[dict[str, Any]]):
    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int = 42, label_names: Any = None) -> None:
        rng = np.random.RandomState(seed)
        self.label_names = ["labels"] if label_names is None else label_names
        self.x = rng.normal(size=(length,)).astype(np.float32)
        self.ys = [a * self.x + b + rng.normal(scale=0.1, size=(length,)) for _ in self.label_names]
        self.ys = [y.astype(np.float32) for y in self.ys]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**{n: y[i] for n, y in zip(self.label_names, self.ys, strict=True)}, "input_x": self.x[i]}


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, length: int = 64) -> None:
        self.rows = RegressionDataset(length=length)

    def __iter__(self) -> Any:
        for i in range(len(self.rows)):
            yield self.rows[i]


class Regression(nn.Module):
    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))
        self.double_output = double_output
        self.config = None

    def forward(self, input_x: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        y = input_x * self.a + self.b
        out = (y, y) if self.double_output else (y,)
        return out if labels is None else (nn.functional.mse_loss(y, labels), *out)


class Noisy(nn.Module):
    """Regression with dropout, so that a resume must also restore the random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(1, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, input_x: torch.Tensor, labels: Any = None) -> Any:
        hidden = nn.functional.dropout(self.inner(input_x[:, None]), 0.3, self.training)
        y = self.outer(hidden)[:, 0]
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class RegressionConfig(PretrainedConfig):
    model_type = "toy-regression"

    def __init__(self, a: float = 0, b: float = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.a, self.b = a, b


class PretrainedRegression(PreTrainedModel):
    config_class = RegressionConfig
    base_model_prefix = "regression"

    def __init__(self, config: RegressionConfig) -> None:
        super().__init__(config)
        self.a = nn.Parameter(torch.tensor(float(config.a)))
        self.b = nn.Parameter(torch.tensor(float(config.b)))
        self.post_init()

    def forward(self, input_x: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        y = input_x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class Accuracy:
    def __call__(self, result: Any) -> dict[str, float]:
        predictions, labels = result
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        return {"accuracy": float((np.abs(predictions - labels) <= 0.25).astype(np.float32).mean())}


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []


def _record(name: str) -> Any:
    def call(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(name)

    return call


for _name in dir(TrainerCallback):
    if _name.startswith("on_"):
        setattr(Recorder, _name, _record(_name))


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    out = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    for index, values in enumerate(trainer.optimizer.state.values()):
        out |= {f"{index}.{k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return out


def lasting(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second", "train_loss")
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in history]


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 0.1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def tokenizer() -> Any:
    """Return a tokenizer with 100 words, for collators."""
    from tokenizers import Tokenizer, models

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 100)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def arrow(rows: int, seed: int = 0) -> Any:
    """Return token rows as an Arrow dataset, with a column that no model accepts."""
    from datasets import Dataset

    data = token_lists(rows, seed)
    data["attention_mask"] = [[1] * len(r) for r in data["input_ids"]]
    data["text"] = ["x"] * rows
    data["label"] = data.pop("labels")
    return Dataset.from_dict(data)
