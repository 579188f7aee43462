"""Which parameters train, at which rate, with or without weight decay; and models with PEFT adapters: the model inside, and the
files that hold what is trained. Home of `peft`, which is optional.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.errors import ConfigError, did_you_mean

_LAYER = re.compile(r"\.(?:layer|layers|albert_layer_groups|h|block)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)embeddings?\.")


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share weight decay and the share of the learning rate they get."""

    names: tuple[str, ...]
    weight_decay: float
    lr_scale: float


def depth_of(name: str, num_layers: int) -> int:
    """0 for embeddings, 1..n for the encoder's layers, n + 1 for everything above."""
    layer = _LAYER.search(name)
    if layer:
        return int(layer.group(1)) + 1
    return 0 if _EMBEDDING.search(name) else num_layers + 1


def count_layers(model: nn.Module) -> int:
    """Encoder layers that can be trained, by the numbers in parameter names: a layer that averages is none of them."""
    named = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbers = [int(m.group(1)) for name in named if (m := _LAYER.search(name))]
    return max(numbers, default=-1) + 1


def matrix_size(model: nn.Module) -> float:
    """The root mean square of the matrices of the encoder's layers."""
    found = [p.detach().float() for name, p in model.named_parameters() if p.ndim == 2 and _LAYER.search(name)]
    squares = sum(float(p.square().sum()) for p in found)
    return math.sqrt(squares / max(sum(p.numel() for p in found), 1))


def param_groups(
    model: nn.Module, *, weight_decay: float, layerwise_lr_decay: float = 1.0, head_lr_scale: float = 1.0
) -> list[ParamGroup]:
    """Groups of the trainable parameters, in a stable order. Only matrices decay: biases and norms do not.

    The rate falls by `layerwise_lr_decay` from each layer to the one below; the head has `head_lr_scale` of the top's.
    """
    layers = count_layers(model)
    groups: dict[tuple[float, float], list[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        depth = depth_of(name, layers)
        scale = head_lr_scale if depth > layers else layerwise_lr_decay ** (layers + 1 - depth)
        groups.setdefault((decay, scale), []).append(name)
    return [ParamGroup(tuple(names), decay, scale) for (decay, scale), names in groups.items()]


def freeze(model: nn.Module, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Stops training of "embeddings", "encoder" (all but the head) or "layers.0-3"; returns the frozen names."""
    layers = count_layers(model)
    frozen: list[str] = []
    for part in parts:
        chosen = _depths_of(part, layers)
        for name, parameter in model.named_parameters():
            if depth_of(name, layers) in chosen and parameter.requires_grad and not _is_head(name, part):
                parameter.requires_grad_(False)
                frozen.append(name)
    if frozen and not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"--freeze {','.join(parts)} leaves nothing to train")
    return tuple(frozen)


def _is_head(name: str, part: str) -> bool:
    """Pooler and classifier stay trainable when the encoder is frozen."""
    return (
        part == "encoder" and re.search(r"(^|\.)(classifier|pooler|pre_classifier|head|score)(\.|$)", name) is not None
    )


def _depths_of(part: str, layers: int) -> set[int]:
    if part == "embeddings":
        return {0}
    if part == "encoder":
        return set(range(layers + 2))
    span = re.fullmatch(r"layers?\.(\d+)(?:-(\d+))?", part)
    if not span:
        known = ("embeddings", "encoder", "layers.0", "layers.0-3")
        fix = did_you_mean(part, known) or "Use embeddings, encoder or layers.0-3."
        raise ConfigError(f"--freeze does not know {part!r}", fix=fix)
    first, last = int(span.group(1)), int(span.group(2) or span.group(1))
    if first > last or last >= layers:
        raise ConfigError(f"--freeze {part}: the model has layers 0 to {layers - 1}")
    return set(range(first + 1, last + 2))


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
    """Tensors that training changes and no adapter file holds: layers unfrozen by hand, a prompt's encoder, buffers."""
    held = {id(t) for file in files.values() for t in file.values()}
    changing = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    changing |= {n for n, _ in model.named_buffers()}
    return {n: t for n, t in tensors.items() if n in changing and id(t) not in held}


def _is_wrapped(model: nn.Module) -> bool:
    return _is_kind(model, "PeftModel")


def _is_kind(model: nn.Module, name: str) -> bool:
    """Whether a model is of a class of PEFT, without importing it."""
    kind = getattr(sys.modules.get("peft"), name, None)
    return kind is not None and isinstance(model, kind)
