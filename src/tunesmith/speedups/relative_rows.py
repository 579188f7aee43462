"""MPNet and DeBERTa on packed batches: their layers take no layout, so it travels beside the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.models.families import Anatomy
from tunesmith.speedups.packing import Layout, first_tokens
from tunesmith.speedups.relative_attention import MpnetRows, RowAttention, RowContext, context_of, row_attention


def attend_relative(model: nn.Module, anatomy: Anatomy) -> list[Callable[[], None]]:
    """Lets the model take packed batches; what comes back undoes it."""
    context = context_of(model)
    rows = row_attention(anatomy.stack, context)
    call = _Call(model, context)
    hooks = [
        model.register_forward_pre_hook(call.begin, with_kwargs=True),
        model.register_forward_hook(call.end, always_call=True),
        anatomy.bare.register_forward_pre_hook(call.without_mask, with_kwargs=True),
        anatomy.bare.register_forward_hook(call.hand_over),
    ]
    undo = [hook.remove for hook in hooks]
    encoder: Any = _MpnetEncoder(anatomy.stack, rows, context) if isinstance(rows, MpnetRows) else None
    encoder = encoder or _DebertaEncoder(anatomy.stack, context)
    undo += [replace_method(anatomy.stack, name, getattr(encoder, name)) for name in encoder.names]
    for layer in anatomy.layers or ():
        own: Any = layer.attention
        own = own.attn if isinstance(rows, MpnetRows) else own.self
        kind = _MpnetAttention if isinstance(rows, MpnetRows) else _DebertaAttention
        undo.append(replace_method(own, "forward", kind(own, rows, context).forward))
    return undo


def replace_method(module: nn.Module, name: str, method: Any) -> Callable[[], None]:
    """On this one module; what comes back undoes it."""
    vars(module)[name] = method
    return lambda: vars(module).pop(name, None)


class _Call:
    """One call of a model: what it is given, and what its head is."""

    def __init__(self, model: nn.Module, context: RowContext) -> None:
        self._config: Any = model.config
        self._context = context
        self._named_problem = False

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Takes the layout out of the arguments."""
        layout = kwargs.get("layout")
        if layout is None:
            return None
        self._context.layout = layout
        labels, config = kwargs.get("labels"), self._config
        if config.model_type == "deberta-v2" and config.problem_type is None and config.num_labels > 1:
            # It searches for labels that are not negative, which waits for the device; the loss is the one named here.
            self._named_problem = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
            config.problem_type = "single_label_classification" if self._named_problem else None
        return args, {k: v for k, v in kwargs.items() if k != "layout"}

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """The call is over, or broke off."""
        self._context.layout = self._context.all_tokens = None
        if self._named_problem:
            self._config.problem_type, self._named_problem = None, False

    def without_mask(self, bare: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Of a packed batch no mask is made: the attention knows the rows. A mask of four dimensions is taken as it is."""
        if self._context.layout is None:
            return None
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return args, {**kwargs, "attention_mask": torch.ones((1, 1, 1, ids.shape[1]), device=ids.device)}

    def hand_over(self, bare: nn.Module, args: Any, output: Any) -> Any:
        """(rows, 1, width) in place of (1, tokens, width): all that a head reads."""
        if self._context.layout is None:
            return output
        if isinstance(output, tuple):
            return first_tokens(output[0], self._context.layout), *output[1:]
        output.last_hidden_state = first_tokens(output.last_hidden_state, self._context.layout)
        return output


class _MpnetEncoder:
    names = ("compute_position_bias",)

    def __init__(self, encoder: Any, rows: MpnetRows, context: RowContext) -> None:
        self._encoder, self._rows, self._context = encoder, rows, context

    def compute_position_bias(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of a packed batch that of the longest row; it holds for the others."""
        if self._context.layout is not None:
            return self._rows.shared(x, self._context.layout)
        found: torch.Tensor = type(self._encoder).compute_position_bias(self._encoder, x, *args, **kwargs)
        return found


class _DebertaEncoder:
    names = ("get_rel_pos",)

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def get_rel_pos(self, *args: Any, **kwargs: Any) -> Any:
        """None of a packed batch: the attention knows the distances within rows."""
        packed = self._context.layout is not None
        return None if packed else type(self._encoder).get_rel_pos(self._encoder, *args, **kwargs)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(tokens, heads, size) from (1, tokens, width)."""
    return x.squeeze(0).view(x.shape[1], heads, -1)


class _MpnetAttention:
    def __init__(self, attention: Any, rows: RowAttention, context: RowContext) -> None:
        self._own, self._rows, self._context = attention, rows, context

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, position_bias: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As transformers' own, of packed rows."""
        own, context = self._own, self._context
        if context.layout is None:
            return type(own).forward(own, hidden_states, attention_mask, position_bias, *args, **kwargs)
        known = hidden_states if context.all_tokens is None else context.all_tokens
        q, k, v = (
            _heads(m(x), own.num_attention_heads) for m, x in ((own.q, hidden_states), (own.k, known), (own.v, known))
        )
        drop = own.dropout.p if own.training else 0.0
        first_only = context.all_tokens is not None
        out = self._rows.attend(own, q, k, v, position_bias, drop=drop, first_only=first_only)
        return (own.o(out.reshape(1, -1, own.all_head_size)),)


class _DebertaAttention:
    def __init__(self, attention: Any, rows: RowAttention, context: RowContext) -> None:
        self._own, self._rows, self._context = attention, rows, context

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, output_attentions: bool = False, query_states: Any = None,
        relative_pos: Any = None, rel_embeddings: Any = None,
    ) -> Any:  # fmt: skip
        """As transformers' own, of packed rows."""
        own, layout = self._own, self._context.layout
        if layout is None:
            given = (hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings)
            return type(own).forward(own, *given)
        asking = hidden_states if query_states is None else query_states
        modules = ((own.query_proj, asking), (own.key_proj, hidden_states), (own.value_proj, hidden_states))
        q, k, v = (_heads(m(x), own.num_attention_heads) for m, x in modules)
        drop = own.dropout.p if own.training else 0.0
        out = self._rows.attend(own, q, k, v, rel_embeddings, drop=drop, first_only=query_states is not None)
        return out.reshape(1, -1, own.all_head_size), None


def keep_first_tokens(model: nn.Module, layer: nn.Module) -> list[Callable[[], None]]:
    """Cuts this last layer to first tokens, of packed batches; what comes back undoes it."""
    context = context_of(model)

    def cut(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout: Layout | None = context.layout
        if layout is None:
            return None
        firsts = args[0].index_select(1, layout.starts)
        if "query_states" in kwargs:  # DeBERTa takes queries of their own
            return args, {**kwargs, "query_states": firsts}
        context.all_tokens = args[0]
        return (firsts, *args[1:]), kwargs

    return [layer.register_forward_pre_hook(cut, with_kwargs=True).remove]
