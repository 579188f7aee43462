"""Optimizer and scheduler of a Trainer: transformers' own factories, so that every name it knows works."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tunesmith.trainer.upstream import get_scheduler, is_optimizer_factory, parts

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Tells bitsandbytes to keep the optimizer's state of embeddings in 32 bits, as transformers does."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def build_optimizer(trainer: Trainer, module: nn.Module) -> Any:
    """The optimizer that `optim` names, or that was given by its class."""
    decayed = set(trainer.get_decay_parameter_names(module))
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for n, p in trained.items() if (n in decayed) is decays],
            "names": [n for n in trained if (n in decayed) is decays],
            "weight_decay": trainer.args.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    given = trainer.optimizer_cls_and_kwargs
    kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, module) if given is None else given
    options = dict(options)
    if is_optimizer_factory(kind):
        made = kind()(module, **options)
    else:
        chosen = next((options.pop(n) for n in ("params", "model", "optimizer_dict") if n in options), groups)
        made = kind(chosen, **options)
    if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
        keep_embeddings_in_32_bits(module)
    return made


def build_scheduler(args: Any, optimizer: Any, num_training_steps: int) -> Any:
    """The scheduler object that `lr_scheduler_type` names."""
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(num_training_steps),
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def decay_names(model: nn.Module) -> list[str]:
    """Parameters that decay: neither biases nor norms."""
    names: list[str] = parts.get_parameter_names(model, [nn.LayerNorm], _NO_DECAY)
    return names


def waits_for_metric(scheduler: Any) -> bool:
    """Whether a scheduler is stepped by an evaluation instead of a training step."""
    step = getattr(scheduler, "step", None)
    if step is None:
        return False
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return plateau or _takes_metrics(getattr(step, "__func__", step))


@functools.lru_cache(maxsize=16)
def _takes_metrics(step: Callable[..., Any]) -> bool:
    """Asked after every step: reading a signature takes as long as the rest of what is done there."""
    return "metrics" in inspect.signature(step).parameters
