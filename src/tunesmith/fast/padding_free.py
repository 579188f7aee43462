"""Padding-free encoding: the model sees the real tokens of a batch in one row, the head the first token of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.encoder.families import anatomy_of, pools_mean, why_not
from tunesmith.errors import ConfigError
from tunesmith.fast.attention import use_registered_attention
from tunesmith.fast.by_row import rows_of_tokens
from tunesmith.fast.modern_cpu import quicken_modern
from tunesmith.fast.packing import Layout, first_tokens


class PaddingFree:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module) -> None:
        anatomy = anatomy_of(model)
        self.first_position = anatomy.first_position
        self.skipped_id = anatomy.first_position - 1 if anatomy.family.positions_follow_padding else None
        self.keys = ("input_ids", "token_type_ids") if anatomy.family.segments else ("input_ids",)
        self._model, self._anatomy = model, anatomy
        self._undo: list[Callable[[], None]] = []
        self.enable()

    def enable(self) -> None:
        """Put the hooks in and let the model attend within rows."""
        if self._anatomy.family.relative:
            from tunesmith.fast.relative_rows import attend_relative

            self._undo += attend_relative(self._model, self._anatomy)
            return
        stack = self._anatomy.stack
        hand_over = _hand_over_means if pools_mean(self._model) else _hand_over_first_tokens
        hooks = [stack.register_forward_hook(hand_over, with_kwargs=True)]
        if stack is self._anatomy.bare:
            hooks.append(stack.register_forward_pre_hook(_without_masks, with_kwargs=True))
            self._undo += quicken_modern(self._anatomy)
        self._undo += [use_registered_attention(self._model), *(hook.remove for hook in hooks)]

    def disable(self) -> None:
        """Take the hooks out and give the model its attention back."""
        while self._undo:
            self._undo.pop()()


def supports(model: nn.Module) -> str | None:
    """None, or the reason why the model must stay padded, to be reported."""
    return why_not(model)


def enable_padding_free(model: nn.Module) -> PaddingFree:
    """Let the model take what `pack` makes: `model(**pack(rows, ...), labels=labels)`. Padded batches still work.

    Embeddings, layers and dropout run on real tokens only; logits come in the order of the rows given.
    """
    reason = supports(model)
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
