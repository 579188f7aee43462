"""Padding-free encoding (the model sees the real tokens of a batch in one row, the head the first token of each), and the last
layer for first tokens only: what the head never reads is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.errors import ConfigError
from tunesmith.models.families import anatomy_of, pools_mean, why_not
from tunesmith.speedups.attention import rows_of_tokens, use_registered_attention
from tunesmith.speedups.packing import Layout, first_tokens


class _Undoable:
    """A strategy as applied to one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._anatomy = model, anatomy_of(model)
        self._undo: list[Callable[[], None]] = []
        self.enable()

    def enable(self) -> None:
        """Changes the model, and notes how to undo that."""
        raise NotImplementedError

    def disable(self) -> None:
        """Leaves the model as it was."""
        while self._undo:
            self._undo.pop()()


class PaddingFree(_Undoable):
    """Rows without padding between them, and what packs them for this model."""

    def __init__(self, model: nn.Module) -> None:
        anatomy = anatomy_of(model)
        self.first_position = anatomy.first_position
        self.skipped_id = anatomy.first_position - 1 if anatomy.family.positions_follow_padding else None
        self.keys = ("input_ids", "token_type_ids") if anatomy.family.segments else ("input_ids",)
        super().__init__(model)

    def enable(self) -> None:
        """Put the hooks in and let the model attend within rows."""
        if self._anatomy.family.relative:
            from tunesmith.speedups.relative_rows import attend_relative

            self._undo += attend_relative(self._model, self._anatomy)
            return
        stack = self._anatomy.stack
        hand_over = _hand_over_means if pools_mean(self._model) else _hand_over_first_tokens
        hooks = [stack.register_forward_hook(hand_over, with_kwargs=True)]
        if stack is self._anatomy.bare:
            hooks.append(stack.register_forward_pre_hook(_without_masks, with_kwargs=True))
        self._undo += [use_registered_attention(self._model), *(hook.remove for hook in hooks)]


def enable_padding_free(model: nn.Module) -> PaddingFree:
    """Let the model take what `pack` makes: `model(**pack(rows, ...), labels=labels)`. Padded batches still work.

    Embeddings, layers and dropout run on real tokens only; logits come in the order of the rows given.
    """
    reason = why_not(model)
    if reason:
        raise ConfigError(f"padding-free is not possible: {reason}", fix="Train it padded.")
    return PaddingFree(model)


def _hand_over_first_tokens(stack: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The stack's output with (rows, 1, width) in place of (1, tokens, width): all that a head reads."""
    layout: Layout | None = kwargs.get("layout")
    if layout is None:
        return output
    output.last_hidden_state = first_tokens(output.last_hidden_state, layout)
    return output


def _hand_over_means(stack: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The same with the mean over each row's tokens: the head takes it for the mean of a row of one token."""
    layout: Layout | None = kwargs.get("layout")
    if layout is None:
        return output
    hidden: torch.Tensor = output.last_hidden_state[0]
    stretch = rows_of_tokens(layout, hidden.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        belongs = (stretch == layout.order.unsqueeze(1)).to(hidden.dtype)
        mean = belongs @ hidden / belongs.sum(1, keepdim=True)
    output.last_hidden_state = mean.unsqueeze(1)
    return output


def _without_masks(stack: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of a packed batch no mask is made: the attention knows the rows."""
    if kwargs.get("layout") is None:
        return None
    return args, {**kwargs, "attention_mask": {"full_attention": None, "sliding_attention": None}}


class FirstTokenOnly(_Undoable):
    """The last layer for first tokens."""

    def enable(self) -> None:
        """Cut the last layer to first tokens."""
        assert self._anatomy.layers is not None
        layer = self._anatomy.layers[-1]
        if self._anatomy.family.relative:
            from tunesmith.speedups.relative_rows import keep_first_tokens

            self._undo += keep_first_tokens(self._model, layer)
            return
        hook = layer.register_forward_pre_hook(_keep_first_tokens, with_kwargs=True)
        self._undo += [use_registered_attention(self._model), hook.remove]


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
    """Cut the last layer's queries, output projection, norms and feed-forward to the rows' first tokens. Exact.

    Works on packed and on padded batches (where attention depends on distances, on packed ones). Keys and values are still made
    from all tokens.
    """
    reason = why_not_first_token(model)
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
