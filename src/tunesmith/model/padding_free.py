"""Padding-free encoding: the model sees the real tokens of a batch in one row, the head the first token of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.errors import ConfigError
from tunesmith.model.attention import use_registered_attention
from tunesmith.model.families import anatomy_of, why_not
from tunesmith.model.packing import Layout


class PaddingFree:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module) -> None:
        anatomy = anatomy_of(model)
        self.first_position = anatomy.first_position
        self.skipped_id = anatomy.first_position - 1 if anatomy.family.positions_follow_padding else None
        self.keys = ("input_ids", "token_type_ids") if anatomy.family.segments else ("input_ids",)
        self._model, self._stack = model, anatomy.stack
        self._undo: list[Callable[[], None]] = []
        self.enable()

    def enable(self) -> None:
        """Put the hook in and let the model attend within rows."""
        hook = self._stack.register_forward_hook(_hand_over_first_tokens, with_kwargs=True)
        self._undo += [use_registered_attention(self._model), hook.remove]

    def disable(self) -> None:
        """Take the hook out and give the model its attention back."""
        while self._undo:
            self._undo.pop()()


def supports(model: nn.Module) -> str | None:
    """None, or the reason why the model must stay padded, to be said aloud."""
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
    hidden: torch.Tensor = output.last_hidden_state[0]
    rows = layout.order
    if hidden.shape[0] != layout.starts.shape[0]:  # equal when the last layer has been cut to first tokens
        rows = layout.starts.index_select(0, rows)
    output.last_hidden_state = hidden.index_select(0, rows).unsqueeze(1)
    return output
