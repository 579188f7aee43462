"""Tiny BERT classifiers with every kind of PEFT adapter; weights are seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)

from conftest import tiny_bert

ATTENTION = ["query", "value"]


def adapted(config: Any, **options: Any) -> Any:
    base = tiny_bert(**options)
    torch.manual_seed(1)
    return get_peft_model(base, config)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_dropout": 0.0, "target_modules": ATTENTION, **options})


def several_adapters() -> Any:
    """Return a model with two adapters; only the one not named "default" is trained."""
    model = adapted(lora(task_type="SEQ_CLS"))
    model.add_adapter("second", lora(task_type="SEQ_CLS", r=2))
    model.set_adapter("second")
    return model


def unfrozen_by_hand() -> Any:
    """Return LoRA with trainable base-model norms, which PEFT doesn't save."""
    model = adapted(lora(task_type="SEQ_CLS"))
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            parameter.requires_grad_(True)
    return model


def inside_the_model() -> Any:
    """Return a model with an adapter added by transformers, without a wrapper; the head is trained as well."""
    model = tiny_bert()
    torch.manual_seed(1)
    model.add_adapter(lora(modules_to_save=["classifier"]))
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: adapted(lora(task_type="SEQ_CLS")),
    "lora-without-task": lambda: adapted(lora(modules_to_save=["classifier"])),
    "lora-biases": lambda: adapted(lora(task_type="SEQ_CLS", bias="all")),
    "dora-of-all-layers": lambda: adapted(lora(task_type="SEQ_CLS", use_dora=True, target_modules="all-linear")),
    "ia3": lambda: adapted(
        IA3Config(task_type="SEQ_CLS", target_modules=["key", "output.dense"], feedforward_modules=["output.dense"])
    ),
    "vera": lambda: adapted(VeraConfig(task_type="SEQ_CLS", r=4, target_modules=ATTENTION)),
    "adalora": lambda: adapted(AdaLoraConfig(task_type="SEQ_CLS", init_r=4, target_modules=ATTENTION, total_step=9)),
    "prompt": lambda: adapted(PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)),
    "prompt-encoder": lambda: adapted(PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=4)),
    "prefix": lambda: adapted(PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)),
    "several-adapters": several_adapters,
    "unfrozen-by-hand": unfrozen_by_hand,
    "inside-the-model": inside_the_model,
}
