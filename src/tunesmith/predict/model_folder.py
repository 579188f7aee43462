"""The folder a trained model leaves behind: loads with `from_pretrained` and `pipeline`; absent or complete."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from tunesmith.keep.snapshot import WEIGHTS, write_tensors
from tunesmith.predict.facts import ModelFacts
from tunesmith.run.sealed import write_sealed
from tunesmith.run.writing import write_new


def describe_model(model: Any, tokenizer: Any, facts: ModelFacts) -> Callable[[Path], None]:
    """A function that writes config, tokenizer and facts into a folder of weights."""

    def describe(folder: Path) -> None:
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # what `fully_shard` calls the class
        config.dtype = "float32"
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        facts.write(folder)

    return describe


def export_model(target: Path, weights: dict[str, torch.Tensor], describe: Callable[[Path], None], card: str) -> None:
    """Publishes the model folder in one rename, with its model card."""

    def fill(folder: Path) -> dict[str, Future[str]]:
        describe(folder)
        write_new(folder / "README.md", card.encode())
        return {WEIGHTS: write_tensors(folder / WEIGHTS, weights, metadata={"format": "pt"})}

    size = sum(t.numel() * t.element_size() for t in weights.values())
    write_sealed(target, fill, {"kind": "model"}, bytes_needed=size)
