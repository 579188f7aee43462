"""Attention over packed examples with scores that depend on the distance of two tokens: MPNet and DeBERTa (disentangled)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tunesmith.models.families import Anatomy
from tunesmith.speedups.packing import HandOver, Layout, attend_by_row, attend_on_cpu, draw_keep_mask, first_tokens


class RowContext:
    """State of one call of a model whose layers can't be passed a layout: the layout of the current batch."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.all_tokens: torch.Tensor | None = None
        """Set inside a last layer that computes only first tokens."""
        self._known: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def kept(self, name: str, longest: int, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that depends only on the longest example; it stays in place because CUDA graphs read it."""
        key = (name, longest, device)
        if key not in self._known:
            with torch.inference_mode(False):  # it may be a prediction that asks first, and a step that asks next
                self._known[key] = make().to(device)
        return self._known[key]


_CONTEXTS: WeakKeyDictionary[nn.Module, RowContext] = WeakKeyDictionary()


def context_of(model: nn.Module) -> RowContext:
    """Return the context of this model."""
    return _CONTEXTS.setdefault(model, RowContext())


def _weigh(scores: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None, drop: float) -> torch.Tensor:
    """Return softmax(scores) @ v over the keys inside the example, with dropout of the weights."""
    if inside is not None:
        scores = scores.masked_fill(~inside[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1)
    if drop > 0 and weights.device.type == "cpu":
        weights = weights * draw_keep_mask(weights, drop)
    elif drop > 0:
        weights = functional.dropout(weights, drop)
    return weights.to(v.dtype) @ v


class MpnetRows:
    """MPNet: one learned bias for each head and distance, shared by all layers."""

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def shared(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the bias of each pair of positions, (heads, longest, longest).

        Each distance is looked up once and laid along the diagonals, so that its gradient is summed in a fixed order. The
        gradient of a table of all pairs would be summed in a random order.
        """

        def buckets() -> torch.Tensor:
            ahead = torch.arange(1 - layout.longest, layout.longest)  # key - query
            found: torch.Tensor = self._encoder.relative_position_bucket(ahead)
            return found

        ids = self._context.kept("buckets", layout.longest, hidden.device, buckets)
        bias: torch.Tensor = self._encoder.relative_attention_bias(ids)
        return _by_distance(bias.t().unsqueeze(1).expand(-1, layout.longest, -1))

    def attend(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *,
        drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return the attention output of the current batch, (queries, heads, size)."""
        layout, scale = self._context.layout, q.shape[-1] ** -0.5
        assert layout is not None
        if q.device.type == "cpu" and q.dtype == bias.dtype and not torch.is_autocast_enabled("cpu"):
            return attend_on_cpu(q, k, v, layout, scale, drop, first_only, bias=bias)

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
            scores = (q @ k.transpose(-1, -2)) * scale
            return _weigh(scores + bias[:, : q.shape[2], : k.shape[2]].to(scores.dtype), v, inside, drop)

        return attend_by_row(q, k, v, layout, core, first_only=first_only)


class DebertaRows:
    """DeBERTa-v2 and v3: content to content, content to position, and position to content."""

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def shared(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """Return the embeddings of distances before the dropout of each layer, (positions, width)."""
        embeddings: torch.Tensor | None = self._encoder.get_rel_embedding()
        return embeddings

    def distances(self, attention: Any, embeddings: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Return the embeddings of the distances query - key, from the largest to the smallest, (2 longest - 1, width).

        Only these are projected; transformers projects the embeddings of all distances that the model knows.
        """
        layout, span = self._context.layout, attention.pos_ebd_size
        assert layout is not None

        def ids() -> torch.Tensor:
            build = sys.modules[type(attention).__module__].build_relative_position
            like = torch.empty(layout.longest, 1)
            sizes = {"bucket_size": attention.position_buckets, "max_position": attention.max_relative_positions}
            rel: torch.Tensor = build(like, like, **sizes)[0]
            descending = torch.cat([rel[:, 0].flip(0), rel[0, 1:]])  # longest - 1, ..., 0, -1, ..., 1 - longest
            return torch.clamp(descending + span, 0, 2 * span - 1)

        known = self._context.kept("distances", layout.longest, embeddings.device, ids)
        dropped = functional.dropout(embeddings[: 2 * span], attention.pos_dropout.p, training)
        return functional.embedding(known, dropped)

    def attend(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, embeddings: torch.Tensor | None, *,
        drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return the attention output of the current batch, (queries, heads, size)."""
        if embeddings is None:
            return self.attend_with(attention, q, k, v, None, None, drop=drop, first_only=first_only)
        placed = self.distances(attention, embeddings, training=attention.training)
        shared = attention.share_att_key
        key = attention.key_proj if shared else getattr(attention, "pos_key_proj", None)
        query = attention.query_proj if shared else getattr(attention, "pos_query_proj", None)
        asked = attention.pos_att_type
        by_key = key(placed) if "c2p" in asked and key is not None else None
        by_query = query(placed) if "p2c" in asked and query is not None else None
        return self.attend_with(attention, q, k, v, by_key, by_query, drop=drop, first_only=first_only)

    def scale(self, attention: Any, size: int) -> float:
        """Return the factor of the scores; as in transformers, its root is computed in float32."""
        kinds = 1 + ("c2p" in attention.pos_att_type) + ("p2c" in attention.pos_att_type)
        return 1.0 / float(np.sqrt(np.float32(size * kinds)))

    def attend_with(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        by_key: torch.Tensor | None, by_query: torch.Tensor | None, *, drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Compute `attend` from the projections of distances as keys and as queries, (2 longest - 1, width)."""
        layout, (heads, size) = self._context.layout, q.shape[1:]
        assert layout is not None
        scale, longest = self.scale(attention, size), layout.longest
        tables = [None if t is None else t.reshape(-1, heads, size).transpose(0, 1) for t in (by_key, by_query)]

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
            keys = k.shape[2]
            near = slice(longest - keys, longest + keys - 1)  # distances within rows of this length
            as_keys, as_queries = (None if t is None else t[:, near] for t in tables)
            scores = q @ k.transpose(-1, -2)
            if as_keys is not None and first_only:
                scores = scores + q @ as_keys[:, keys - 1 :].transpose(-1, -2)
            elif as_keys is not None:
                scores = scores + _by_distance(q @ as_keys.transpose(-1, -2))
            if as_queries is not None and first_only:
                scores = scores + (k * as_queries[:, keys - 1 :]).sum(-1, keepdim=True).transpose(-1, -2)
            elif as_queries is not None:
                scores = scores + _by_distance(k @ as_queries.flip(1).transpose(-1, -2)).transpose(-1, -2)
            return _weigh(scores * scale, v, inside, drop)

        return attend_by_row(q, k, v, layout, core, first_only=first_only)


def _by_distance(x: torch.Tensor) -> torch.Tensor:
    """Return a view (..., n, n) of x (..., n, 2n - 1): row i contains the n entries that start at n - 1 - i."""
    x = x.contiguous()
    length, width = x.shape[-2:]
    return x.as_strided((*x.shape[:-1], length), (*x.stride()[:-2], width - 1, 1), x.storage_offset() + length - 1)


RowAttention = MpnetRows | DebertaRows


def row_attention(encoder: nn.Module, context: RowContext) -> RowAttention:
    """Return the attention of this kind of encoder."""
    kind = MpnetRows if hasattr(encoder, "relative_attention_bias") else DebertaRows
    return kind(encoder, context)


def attend_relative(model: nn.Module, anatomy: Anatomy, hand_over: HandOver | None = None) -> list[Callable[[], None]]:
    """Let the model accept packed batches; return the functions that undo it."""
    context = context_of(model)
    rows = row_attention(anatomy.stack, context)
    call = _Call(model, context)
    hooks = [
        model.register_forward_pre_hook(call.begin, with_kwargs=True),
        model.register_forward_hook(call.end, always_call=True),
        anatomy.bare.register_forward_pre_hook(call.without_mask, with_kwargs=True),
        anatomy.bare.register_forward_hook(hand_over or call.hand_over, with_kwargs=True),
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
    """Replace a method of this module only; return the function that undoes it."""
    vars(module)[name] = method
    return lambda: vars(module).pop(name, None)


class _Call:
    """Hooks around one call of a model: they pass the layout to its layers, and first tokens to its head."""

    def __init__(self, model: nn.Module, context: RowContext) -> None:
        self._config: Any = model.config
        self._context = context
        self._named_problem = False

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Take the layout out of the arguments."""
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
        """Forget the layout after the call, even if it failed."""
        self._context.layout = self._context.all_tokens = None
        if self._named_problem:
            self._config.problem_type, self._named_problem = None, False

    def without_mask(self, bare: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replace the mask of a packed batch by a trivial one with four dimensions, which the encoder uses without changes."""
        if self._context.layout is None:
            return None
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return args, {**kwargs, "attention_mask": torch.ones((1, 1, 1, ids.shape[1]), device=ids.device)}

    def hand_over(self, bare: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return only first tokens, (rows, 1, width) instead of (1, tokens, width): heads read nothing else."""
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
        """Return the bias for the longest example of a packed batch; it contains that of the others."""
        if self._context.layout is not None:
            return self._rows.shared(x, self._context.layout)
        found: torch.Tensor = type(self._encoder).compute_position_bias(self._encoder, x, *args, **kwargs)
        return found


class _DebertaEncoder:
    names = ("get_rel_pos",)

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def get_rel_pos(self, *args: Any, **kwargs: Any) -> Any:
        """Return None for a packed batch, because the attention computes the distances within each example."""
        packed = self._context.layout is not None
        return None if packed else type(self._encoder).get_rel_pos(self._encoder, *args, **kwargs)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape (1, tokens, width) to (tokens, heads, size)."""
    return x.squeeze(0).view(x.shape[1], heads, -1)


class _MpnetAttention:
    def __init__(self, attention: Any, rows: RowAttention, context: RowContext) -> None:
        self._own, self._rows, self._context = attention, rows, context

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, position_bias: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Compute attention as transformers does, over packed examples."""
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
        """Compute attention as transformers does, over packed examples."""
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
    """Let this last layer compute only first tokens of packed batches; return the functions that undo it."""
    context = context_of(model)

    def cut(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout: Layout | None = context.layout
        if layout is None:
            return None
        firsts = args[0].index_select(1, layout.starts)
        if "query_states" in kwargs:  # DeBERTa passes separate queries
            return args, {**kwargs, "query_states": firsts}
        context.all_tokens = args[0]
        return (firsts, *args[1:]), kwargs

    return [layer.register_forward_pre_hook(cut, with_kwargs=True).remove]
