"""The optimizer, and the parameters that it trains, with their learning rates and weight decay.
Clipping and the NaN check are part of the fused update."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.training.distributed import has_triton

if TYPE_CHECKING:
    from tunesmith.speedups.fused_layers import FusedStack

Rate = float | torch.Tensor
"""A number, or a tensor that a CUDA graph reads."""
_LAYER = re.compile(r"\.(?:layer|layers|albert_layer_groups|h|block)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)embeddings?\.")
_HEAD = re.compile(r"(^|\.)(classifier|pooler|pre_classifier|head|score)(\.|$)")


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    layerwise_lr_decay: float = 1.0,
    head_lr_scale: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    optim: str = "adamw_torch_fused",
) -> Optimizer:
    """Return an optimizer for the trainable parameters; each group has parameter names and a share of the learning rate."""
    by_name = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [by_name[n] for n in group.names],
            "names": list(group.names),
            "weight_decay": group.weight_decay,
            "lr_scale": group.lr_scale,
            "lr": learning_rate * group.lr_scale,
        }
        for group in param_groups(
            model, weight_decay=weight_decay, layerwise_lr_decay=layerwise_lr_decay, head_lr_scale=head_lr_scale
        )
    ]
    fused = optim == "adamw_torch_fused"
    on_gpu = fused and all(p.device.type == "cuda" for p in by_name.values())
    if on_gpu:  # the learning rate is a tensor on the device, so that a CUDA graph can read it
        for group in groups:
            group["lr"] = torch.full((), group["lr"], device=group["params"][0].device)
    return AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, capturable=on_gpu, fused=fused)


def make_kernel(optimizer: Optimizer, layers: FusedStack | None) -> Any:
    """Return a kernel that updates the weights of a fused AdamW on a GPU, and the copies of fused layers with them.

    None without triton, for other optimizers, and for parameters that it doesn't support.
    """
    copies = {} if layers is None else layers.copies
    if not _takes_kernel(optimizer, copies):
        return None
    from tunesmith.speedups.kernels.adamw import OneKernelAdamW

    return OneKernelAdamW(optimizer, copies)


def _takes_kernel(optimizer: Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]) -> bool:
    if type(optimizer) is not AdamW or not has_triton():
        return False
    groups = optimizer.param_groups
    if not all(g["fused"] and not (g["amsgrad"] or g["maximize"]) for g in groups):
        return False
    parameters = [p for group in groups for p in group["params"]]
    plain = all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    return plain and all(t.data_ptr() % 16 == 0 for t in (*parameters, *copies.values()))


def fuse_update(optimizer: Optimizer) -> bool:
    """Let torch's Adam, AdamW or SGD update everything in one kernel, which can skip an update without the host.

    Return whether it does. An optimizer whose creator chose another implementation stays as it is.
    """
    if type(optimizer) not in (Adam, AdamW, SGD):
        return False
    unset = ("fused", "foreach", "capturable", "differentiable")
    if not all(g.get("fused") or not any(g.get(name) for name in unset) for g in optimizer.param_groups):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len({p.device for p in parameters}) != 1 or not all(p.is_floating_point() for p in parameters):
        return False
    for group in optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
    vars(optimizer)["_step_supports_amp_scaling"] = True
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = state["step"].to(parameter.device)
    return True


def set_rate(optimizer: Optimizer, rate: Rate) -> None:
    """Set the learning rate of every group from the schedule's value, in place if it is a tensor."""
    for group in optimizer.param_groups:
        value = rate * group.get("lr_scale", 1.0)
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = value
        elif isinstance(value, torch.Tensor):
            group["lr"].copy_(value)
        else:
            group["lr"].fill_(value)


def trained_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def make_moments(optimizer: Optimizer) -> None:
    """Create the state of Adam's first step for every parameter with a gradient, before any of them is updated.

    An out-of-memory error here has changed nothing, unlike one during the first update.
    """
    if type(optimizer) not in (Adam, AdamW) or not any(p not in optimizer.state for p in trained_parameters(optimizer)):
        return
    for group in optimizer.param_groups:
        on_device = group["capturable"] or group["fused"]
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        for p in group["params"]:
            if p.grad is not None and p not in optimizer.state:
                made = {"step": torch.zeros((), device=p.device if on_device else "cpu")}
                optimizer.state[p] = made | {n: torch.zeros_like(p, memory_format=torch.preserve_format) for n in names}


def apply_update(optimizer: Optimizer, divisor: torch.Tensor, skip: torch.Tensor, kernel: Any = None) -> None:
    """Step the optimizer with gradients / divisor, unless `skip` is 1.0. Doesn't wait for the device if it is fused."""
    if kernel is not None and not kernel.is_watched:
        kernel.step(divisor, skip)
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # scale and flag are inputs of its kernel
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = divisor.float(), skip.float()  # of a float64 model they are float64
        try:
            optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf
        return
    skipped, divided = torch.stack([skip, divisor]).tolist()  # one wait for the device
    if skipped != 0.0:
        return
    if divided != 1.0:
        torch._foreach_div_([p.grad for p in trained_parameters(optimizer) if p.grad is not None], divisor)
    optimizer.step()


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with the same weight decay and learning rate factor."""

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
    """Return the trainable encoder layers by the numbers in parameter names, without an averaging layer."""
    named = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbers = [int(m.group(1)) for name in named if (m := _LAYER.search(name))]
    return max(numbers, default=-1) + 1


def matrix_size(model: nn.Module) -> float:
    """Return the root mean square of the weight matrices of the encoder's layers."""
    found = [p.detach().float() for name, p in model.named_parameters() if p.ndim == 2 and _LAYER.search(name)]
    squares = sum(float(p.square().sum()) for p in found)
    return math.sqrt(squares / max(sum(p.numel() for p in found), 1))


def param_groups(
    model: nn.Module, *, weight_decay: float, layerwise_lr_decay: float = 1.0, head_lr_scale: float = 1.0
) -> list[ParamGroup]:
    """Return groups of the trainable parameters in a stable order. Weight decay applies to matrices, not to biases and norms.

    The learning rate falls by `layerwise_lr_decay` from each layer to the one below; the head has `head_lr_scale` of the top.
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


def freeze(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Freeze "embeddings", "encoder" (all except pooler and head) or "layers.0-3"."""
    layers = count_layers(model)
    for part in parts:
        chosen = _depths_of(part, layers)
        for name, parameter in model.named_parameters():
            is_head = part == "encoder" and _HEAD.search(name) is not None
            if depth_of(name, layers) in chosen and parameter.requires_grad and not is_head:
                parameter.requires_grad_(False)
    if parts and not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"--freeze {','.join(parts)} leaves nothing to train")


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
