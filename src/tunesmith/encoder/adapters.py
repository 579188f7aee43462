"""Models with PEFT adapters: the model inside, and the files that hold what is trained. Home of `peft`, which is optional."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ADAPTER = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What transformers puts before the keys of an adapter that `model.add_adapter` made."""


def has_adapters(model: nn.Module) -> bool:
    """Whether the files of this model are those of its adapters: made by `get_peft_model`, or by `model.add_adapter`."""
    return _is_wrapped(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_mixed(model: nn.Module) -> bool:
    """Whether adapters of several kinds are mixed (`PeftMixedModel`): PEFT has no files for these."""
    return _is_kind(model, "PeftMixedModel")


def inner_model(model: nn.Module) -> nn.Module:
    """The model that the adapters were put into, which names inputs and labels; the model itself where there are none."""
    if not (_is_wrapped(model) or is_mixed(model)):
        return model
    wrapper: Any = model
    inner: nn.Module = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper.base_model.model
    return inner


def adapter_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, embeddings: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file and key, in PEFT's layout: the adapter `default` at the top, others in a folder of their name.

    Those that are stored as they are in `tensors`, the model's state dict, are the same objects. `embeddings`: with those
    that PEFT adds where the vocabulary was resized.
    """
    from peft import get_peft_model_state_dict

    wrapped = _is_wrapped(model)
    adapted: Any = model
    files = {}
    for name in list(adapted.peft_config) if wrapped else adapted.active_adapters()[:1]:
        found = get_peft_model_state_dict(
            model, state_dict=tensors, adapter_name=name, save_embedding_layers="auto" if embeddings else False
        )
        folder = f"{name}/" if wrapped and name != "default" else ""
        files[f"{folder}{ADAPTER}"] = found if wrapped else {f"{_PREFIX}{k}": v for k, v in found.items()}
    return files


def trained_beside(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], files: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What training changes and the adapter files do not hold as it is: layers unfrozen by hand, a prompt's encoder, buffers."""
    held = {id(t) for file in files.values() for t in file.values()}
    changing = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    changing |= {n for n, _ in model.named_buffers()}
    return {n: t for n, t in tensors.items() if n in changing and id(t) not in held}


def _is_wrapped(model: nn.Module) -> bool:
    return _is_kind(model, "PeftModel")


def _is_kind(model: nn.Module, name: str) -> bool:
    """Whether a model is of a class of PEFT, which is not imported for the answer."""
    kind = getattr(sys.modules.get("peft"), name, None)
    return kind is not None and isinstance(model, kind)
