"""The optimizer of a Trainer where transformers does something beside making it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from conftest import tiny_bert
from trainer_toys import arguments
from tunesmith import Trainer


class Manager:
    """bitsandbytes' list of parameters that are treated in another way: a stand-in, as the library is not a dependency."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, str, dict[str, int]]] = []

    def get_instance(self) -> Manager:
        return self

    def register_module_override(self, module: Any, name: str, config: dict[str, int]) -> None:
        self.calls.append((module, name, config))


class Adam8bit(torch.optim.AdamW):
    """An optimizer that looks like one of bitsandbytes, by the module it says it is from."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params: Any, optim_bits: int = 32, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize("bits", [8, 32])
def test_bitsandbytes_keeps_the_state_of_embeddings_in_32_bits_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    manager = Manager()
    fake = SimpleNamespace(optim=SimpleNamespace(GlobalOptimManager=manager))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)  # type: ignore[arg-type]
    model = tiny_bert()
    seen = []
    for kind in (transformers.Trainer, Trainer):
        manager.calls.clear()
        chosen = (Adam8bit, {"lr": 1e-3, "optim_bits": bits})
        kind(model, arguments(tmp_path), optimizer_cls_and_kwargs=chosen).create_optimizer()
        seen.append(list(manager.calls))
    assert seen[0] == seen[1]
    embeddings = model.bert.embeddings
    kept = [embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings]
    assert seen[1] == ([(module, "weight", {"optim_bits": 32}) for module in kept] if bits == 8 else [])
