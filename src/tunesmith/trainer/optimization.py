"""Optimizer and scheduler of a Trainer: transformers' own factories, so that every name it knows works."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.upstream import get_scheduler, is_optimizer_factory, optimizer_class_and_options, parts

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Tells bitsandbytes to keep the optimizer's state of embeddings in 32 bits, as transformers does."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


class OptimizerPart(TrainerAttributes):
    """The methods of a Trainer that make the optimizer and the scheduler."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Sets up both; override this, or one of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer, made once; an optimizer the user gave is kept."""
        if self.optimizer is not None:
            return self.optimizer
        module: nn.Module = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(module))
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        groups: list[dict[str, Any]] = [
            {
                "params": [p for n, p in trained.items() if (n in decayed) is decays],
                "names": [n for n in trained if (n in decayed) is decays],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        if self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
        else:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, module)
        options = dict(options)
        if is_optimizer_factory(kind):
            self.optimizer = kind()(module, **options)
        else:
            given = next((options.pop(n) for n in ("params", "model", "optimizer_dict") if n in options), groups)
            self.optimizer = kind(given, **options)
        if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
            keep_embeddings_in_32_bits(module)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler object, made once a run; a scheduler the user gave is kept."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """(class, options) of the optimizer that `optim` names."""
        found: tuple[Any, Any] = optimizer_class_and_options(args, model)
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that decay: neither biases nor norms."""
        names: list[str] = parts.get_parameter_names(model, [nn.LayerNorm], _NO_DECAY)
        return names

    def _get_learning_rate(self) -> float:
        """The rate the next step will use."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _waits_for_metric(self) -> bool:
        """Whether the scheduler is stepped by an evaluation instead of a training step."""
        step = getattr(self.lr_scheduler, "step", None)
        if step is None:
            return False
        plateau = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return plateau or "metrics" in inspect.signature(step).parameters

    def _step_scheduler(self) -> None:
        if self.lr_scheduler is not None and not self._waits_for_metric():
            self.lr_scheduler.step()
