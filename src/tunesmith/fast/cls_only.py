"""The last layer for first tokens only: what the head never reads is not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.encoder.families import anatomy_of, pools_mean, why_not
from tunesmith.errors import ConfigError
from tunesmith.fast.attention import use_registered_attention
from tunesmith.fast.packing import Layout


class FirstTokenOnly:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module) -> None:
        layers = anatomy_of(model).layers
        assert layers is not None
        self._model, self._layer = model, layers[-1]
        self._undo: list[Callable[[], None]] = []
        self.enable()

    def enable(self) -> None:
        """Cut the last layer to first tokens."""
        if anatomy_of(self._model).family.relative:
            from tunesmith.fast.relative_rows import keep_first_tokens

            self._undo += keep_first_tokens(self._model, self._layer)
            return
        hook = self._layer.register_forward_pre_hook(_keep_first_tokens, with_kwargs=True)
        self._undo += [use_registered_attention(self._model), hook.remove]

    def disable(self) -> None:
        """Let the last layer run for all tokens again."""
        while self._undo:
            self._undo.pop()()


def supports(model: nn.Module) -> str | None:
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
    """Cut the last layer's queries, output projection, norms and feed-forward to the rows' first tokens. Exact.

    Works on packed and on padded batches (where attention depends on distances, on packed ones). Keys and values are still made
    from all tokens.
    """
    reason = supports(model)
    if reason:
        raise ConfigError(f"the last layer cannot be cut: {reason}", fix="Leave it whole.")
    return FirstTokenOnly(model)


def _keep_first_tokens(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments with first tokens as hidden states, and all tokens on the side for the attention."""
    hidden: torch.Tensor = args[0]
    layout: Layout | None = kwargs.get("layout")
    firsts = hidden[:, :1] if layout is None else hidden.index_select(1, layout.starts)
    return (firsts, *args[1:]), {**kwargs, "all_tokens": hidden}
