"""What a recipe decides about a run, with the values of transformers for what is not decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of the same names. The defaults are those of `transformers.TrainingArguments`: `--recipe hf`."""

    pooling: Literal["pooler", "first", "mean"] = "pooler"
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 5e-5
    layerwise_lr_decay: float = 1.0
    head_lr_scale: float = 1.0
    warmup_steps: int | float = 0
    weight_decay: float = 0.0
