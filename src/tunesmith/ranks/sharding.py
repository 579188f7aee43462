"""A model whose weights, gradients and optimizer state are sharded over the ranks: torch's `fully_shard` (FSDP2).

A shard of a tensor is a `DTensor`; all ranks gather the full tensor at once (decisions/0401).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from tunesmith.errors import ConfigError
from tunesmith.ranks.sharding_options import Sharding

_SHARDED: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()
"""The models that were sharded, and how: torch has no getter for it."""


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` was at work."""
    return model in _SHARDED


def shard_model(model: nn.Module, optimizer: Optimizer, sharding: Sharding, device: torch.device) -> None:
    """Shards the model over all ranks, in place, from the weights of rank 0, and points the optimizer at the shards."""
    if is_sharded(model):
        return
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        # DDP does this, too: a head that a rank drew from another seed would give it other parts
        sent = tensor.data.contiguous()  # itself, where it is contiguous already
        torch.distributed.broadcast(sent, 0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(sent)
    _fully_shard(model, sharding, device)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise ConfigError(
                "the optimizer holds parameters that are not the model's, and cannot be sharded with it",
                fix="Make it from model.parameters(), or leave fsdp out.",
            )
        fresh = []
        for old in group["params"]:
            new = by_name[names[id(old)]]
            if old in optimizer.state:
                optimizer.state[new] = {k: sharded_like(v, new) for k, v in optimizer.state.pop(old).items()}
            fresh.append(new)
        group["params"] = fresh


def _fully_shard(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    own = getattr(model, "_no_split_modules", None) or ()
    wanted = set(own if sharding.layers is None else sharding.layers)
    found = [m for m in model.modules() if type(m).__name__ in wanted]
    missing = wanted - {type(m).__name__ for m in found} if sharding.layers is not None else set()
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(
            f"fsdp_config transformer_layer_cls_to_wrap: the model has no {', '.join(sorted(missing))}",
            fix=f"It has {', '.join(known[:20])}.",
        )
    for module in found:
        fully_shard(module, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    fully_shard(model, mesh=mesh)
    _SHARDED[model] = sharding


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Inside, each rank holds all weights and its passes wait for no other rank: ranks may run different numbers of batches.

    All ranks enter and leave it together. Gradients of passes inside stay on their rank, and are dropped at the end.
    """
    if not is_sharded(model):
        yield
        return
    root: Any = model
    parts: list[Any] = [m for m in model.modules() if hasattr(m, "unshard")]
    for part in parts:
        part.unshard()
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for part in parts:
            # the outermost keeps its weights (embeddings, head) until the backward pass, which begins with them
            part.set_reshard_after_forward(_SHARDED[model].reshard_after_forward and part is not root, recurse=False)
            part.reshard()
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; all ranks ask for it together. One that is not sharded is returned as it is."""
    if hasattr(tensor, "full_tensor"):
        full: torch.Tensor = tensor.full_tensor()
        return full
    return tensor


def gathered_state(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """The model's tensors, whole and on the CPU; all ranks call it, those that do not `keep` get an empty dict."""
    return _each_gathered(model.state_dict(), keep=keep)


def _each_gathered(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in tensors.items():
        full = gathered(tensor.detach())  # one at a time: a device need not hold more than the largest
        if keep:
            out[name] = full.cpu()
    return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def sharded_like(stored: Any, own: torch.Tensor) -> Any:
    """A full tensor in the form that `own` has: this rank's shard of it where `own` is sharded. Asks no other rank."""
    if not hasattr(own, "full_tensor") or not isinstance(stored, torch.Tensor) or stored.shape != own.shape:
        return stored
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(stored.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
