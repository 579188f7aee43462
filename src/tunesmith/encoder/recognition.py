"""Whether a model is the very thing transformers builds from its config: class by class, with nothing listening inside."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tunesmith.encoder.sizes import without_first_values

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = tuple(f"_global{name}" for name in _OF_MODULES)
_HARMLESS = ("tunesmith.", "transformers.utils.output_capturing")
"""Hooks of our own, and those that collect hidden states: they do nothing unless the config asks for them."""


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables that hooks of these modules, and of all modules, are kept in."""
    tables = [getattr(module, name) for module in modules for name in _OF_MODULES]
    return tables + [getattr(global_hooks, name) for name in _OF_ALL_MODULES]


def is_watched(tables: Iterable[dict[int, Any]]) -> bool:
    """Whether a hook of the user's is in one of the tables: it would see other shapes, or not be called at all."""
    hooks = (hook for table in tables if table for hook in table.values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has a hold on it or a part of it: what it traced would be traced again for every change."""
    return any(
        type(m).__module__.startswith("torch._dynamo.") or m._compiled_call_impl is not None for m in model.modules()
    )


def why_not_original(model: nn.Module, own_head: tuple[str, ...]) -> str | None:
    """Where the model differs from what transformers builds from its config; None when it does not.

    Parts under the names of `own_head` may be anything: they are handed a vector for each row.
    """
    kind: Any = type(model)
    config: Any = model.config
    try:
        expected = _classes_built(kind, config.to_json_string())
    except Exception as error:  # a config changed by hand can fail in any way
        return f"transformers does not build it from its config ({type(error).__name__})"
    for name, module in model.named_modules(remove_duplicate=False):
        if name.split(".", 1)[0] in own_head:
            continue
        found = _class_of(module)
        if found is not expected.get(name):
            return f"{name} is a {found.__module__}.{found.__qualname__}, which is not what transformers has there"
        replaced = replaced_method(module)
        if replaced:
            return f"{replaced} of {name or type(model).__name__} was replaced"
    if is_watched(hook_tables(model.modules())):
        return "hooks listen to its modules"
    return "it is compiled" if is_compiled(model) else None


@functools.lru_cache(maxsize=16)
def _classes_built(kind: type[Any], config: str) -> Mapping[str, type]:
    """The class of each module of a fresh model; on the meta device, so that nothing is computed or drawn."""
    with without_first_values(), torch.device("meta"):
        fresh = kind(kind.config_class.from_dict(json.loads(config)))
    return {name: type(module) for name, module in fresh.named_modules(remove_duplicate=False)}


def _class_of(module: nn.Module) -> type:
    """The class of a module; of one that we swapped, the class it stands for."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("tunesmith."))


def replaced_method(module: nn.Module) -> str | None:
    """The name of a method that was replaced on the instance or by a patch of the class."""
    for name, value in vars(module).items():
        if callable(getattr(type(module), name, None)) and not _is_ours(value):
            return name
    home = str(getattr(type(module).forward, "__module__", ""))
    return None if home.startswith(("torch.nn.", "transformers.", "tunesmith.")) else "forward"


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("tunesmith.")
