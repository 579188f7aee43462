"""The last layer for first tokens only: the head never reads the others, so they are not computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tunesmith.errors import ConfigError
from tunesmith.models.families import anatomy_of, pools_mean, why_not
from tunesmith.speedups.packing import Layout, Undoable


class FirstTokenOnly(Undoable):
    """The last layer for first tokens."""

    def enable(self) -> None:
        """Cut the last layer to first tokens."""
        assert self._anatomy.layers is not None
        layer = self._anatomy.layers[-1]
        if self._anatomy.family.relative:
            from tunesmith.speedups.relative import keep_first_tokens

            self._undo += keep_first_tokens(self._model, layer)
            return
        self._undo.append(layer.register_forward_pre_hook(_keep_first_tokens, with_kwargs=True).remove)


def why_not_first_token(model: nn.Module) -> str | None:
    """None, or the reason why the last layer must run for all tokens."""
    reason = why_not(model)
    if reason:
        return reason
    anatomy = anatomy_of(model)
    layers = anatomy.layers
    if anatomy.stack is anatomy.bare:
        mean = "its head reads the mean of all tokens"
        return mean if pools_mean(model) else "its last layer rotates queries by their positions"
    if layers is None or any(layer is layers[-1] for layer in layers[:-1]):
        return f"the layers of {model.config.model_type} share one set of modules"  # type: ignore[union-attr]
    return None if len(layers) else "it has no layers"


def enable_first_token_only(model: nn.Module) -> FirstTokenOnly:
    """Compute the last layer's queries, output projection, norms and feed-forward for first tokens of packed batches only.

    Keys and values are still made from all tokens. Padded batches, such as a user's own calls, get the whole layer.
    """
    reason = why_not_first_token(model)
    if reason:
        raise ConfigError(f"the last layer cannot be cut: {reason}", fix="Leave it whole.")
    return FirstTokenOnly(model)


def _keep_first_tokens(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's arguments with first tokens as hidden states, and all tokens in addition for the attention."""
    layout: Layout | None = kwargs.get("layout")
    if layout is None:
        return None
    hidden: torch.Tensor = args[0]
    return (hidden.index_select(1, layout.starts), *args[1:]), {**kwargs, "all_tokens": hidden}
