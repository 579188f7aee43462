"""What a captured step has built in, and somebody could change between two steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer

from tunesmith.model.fused_ops import is_hooked

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Surroundings:
    """Looks at a model and its optimizer before each step: a replay would not notice what they have become."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        modules = list(model.modules())
        self._optimizer = optimizer
        self._parameters = [(m._parameters, name) for m in modules for name in m._parameters]
        self._dropouts = [m for m in modules if isinstance(m, nn.Dropout)]
        self._hooks: list[dict[int, Any]] = [getattr(m, name) for m in modules for name in _OF_MODULES]
        self._hooks += [getattr(global_hooks, name) for name in _OF_ALL_MODULES]
        self._hooks += [getattr(optimizer, name) for name in STEP_HOOKS if hasattr(optimizer, name)]

    def look(self) -> Hashable | None:
        """Equal as long as a captured step still does what it would do uncaptured; None while somebody listens inside one."""
        parameters = [p for places, name in self._parameters if (p := places[name]) is not None]
        if self._somebody_listens(parameters):
            return None
        groups = self._optimizer.param_groups
        settings = tuple((g.get("weight_decay"), g.get("betas"), g.get("eps"), len(g["params"])) for g in groups)
        places = tuple(p.data_ptr() if p.requires_grad else -p.data_ptr() for p in parameters)
        return places, tuple(m.p for m in self._dropouts), settings, id(self._optimizer.state)

    def _somebody_listens(self, parameters: Iterable[torch.Tensor]) -> bool:
        of_modules = (hook for hooks in self._hooks if hooks for hook in hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith("tunesmith.") for hook in of_modules):
            return True
        return any(is_hooked(p) for p in parameters)
