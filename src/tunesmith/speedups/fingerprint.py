"""What a captured step has fixed, and what a proof of the speed-ups was about: either can change between two steps."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter

import torch
from torch import nn
from torch.optim import Optimizer

from tunesmith.models.families import hook_tables, is_watched

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SETTINGS = ("weight_decay", "betas", "eps", "amsgrad", "maximize")
REQUIRES_GRAD, DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
"""What sees the gradient of a parameter as soon as it is there (`is_hooked`); read for all of them before every step."""


class Fingerprint:
    """Of a model and its optimizer, taken before each step: a replay would not notice what they have become."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._places, self._moves = list[int](), 0
        self._list_modules()

    def _list_modules(self) -> None:
        self._modules = list(self._model.modules())
        self._attributes = [vars(module) for module in self._modules]
        self._inside = [module._modules for module in self._modules]
        self._tables = [module._parameters for module in self._modules]
        self._hooks = hook_tables(self._modules)
        self._dropouts = [m for m in self._modules if isinstance(m, nn.Dropout)]
        self._shares = [(a, n) for a in self._attributes for n, v in a.items() if "drop" in n and isinstance(v, float)]
        self._children = self._child_ids()

    def _child_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._inside))))

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in chain.from_iterable(map(dict.values, self._tables)) if p is not None]

    def of_model(self) -> Hashable:
        """Equal as long as the model is the one that the speed-ups were proved on: its parts, their classes and hooks."""
        if self._child_ids() != self._children:
            self._list_modules()
        parts = (*map(id, self._modules), *map(id, map(type, self._modules)))
        forwards = tuple(id(a["forward"]) for a in self._attributes if "forward" in a)
        hooks = tuple(id(hook) for table in filter(None, self._hooks) for hook in table.values())
        parameters = self._parameters()
        trained = (*map(id, parameters), *map(REQUIRES_GRAD, parameters), *map(DTYPE, parameters))
        config = getattr(self._model, "config", None)
        asked = ("_attn_implementation", "output_hidden_states", "output_attentions")
        return parts, forwards, hooks, trained, tuple(getattr(config, name, None) for name in asked)

    def of_step(self) -> Hashable | None:
        """Equal as long as a captured step still does what it would do uncaptured; None while a hook is called inside one."""
        parameters = self._parameters()
        of_optimizer = [getattr(self._optimizer, name) for name in STEP_HOOKS if hasattr(self._optimizer, name)]
        if is_watched(filter(None, [*self._hooks, *of_optimizer])) or any(any(map(of, parameters)) for of in HOOKS):
            return None
        settings = tuple(tuple(g.get(n) for n in _SETTINGS) for g in self._optimizer.param_groups)
        trained = (*[len(g["params"]) for g in self._optimizer.param_groups], *map(REQUIRES_GRAD, parameters))
        places = tuple(map(torch.Tensor.data_ptr, parameters))
        shares = (*[m.p for m in self._dropouts], *[a.get(n) for a, n in self._shares])
        return places, shares, settings, trained, self._changes_of_moments()

    def _changes_of_moments(self) -> int:
        """How often the optimizer's state came to lie elsewhere, as what a checkpoint or `load_state_dict` puts in does.

        The first step makes it: that is not a change.
        """
        values = chain.from_iterable(state.values() for state in self._optimizer.state.values())
        places = [v.data_ptr() for v in values if isinstance(v, torch.Tensor)]
        if places != self._places:
            self._moves += bool(self._places)
            self._places = places
        return self._moves
