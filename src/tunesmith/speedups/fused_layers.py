"""Encoder layers in half precision with few, fused kernels: the stack of a model run on its own parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tunesmith.models.families import anatomy_of
from tunesmith.speedups.fused_attention import attend_by_distance, attend_fused, attends_fused
from tunesmith.speedups.fused_ops import add_norm, gelu_linear, linear
from tunesmith.speedups.fused_stack import FusedStack, LayerParts, parts_of, probability
from tunesmith.speedups.packing import Layout
from tunesmith.speedups.relative_attention import DebertaRows, MpnetRows, RowAttention, context_of, row_attention

Distances = tuple[RowAttention, "torch.Tensor | None"]
"""Attention by distances, and what all layers share of it in a step."""


class LayerCopies:
    """The matrices of one layer in the type that products are computed in; query, key and value as one."""

    def __init__(self, parts: LayerParts, dtype: torch.dtype) -> None:
        weight = parts.query.weight
        width = parts.query.out_features
        self.parts = parts
        self.qkv = torch.empty(3 * width, weight.shape[1], dtype=dtype, device=weight.device)
        self.qkv_bias = torch.empty(3 * width, dtype=dtype, device=weight.device)
        others = (parts.attention_output, parts.widen, parts.narrow)
        self.attention_output, self.widen, self.narrow = (torch.empty_like(m.weight, dtype=dtype) for m in others)
        three = (parts.query, parts.key, parts.value)
        self.three = (*(m.weight for m in three), *(m.bias for m in three))
        self.copied = (*self.three, *(m.weight for m in others))
        self.targets = [
            *self.qkv.chunk(3), *self.qkv_bias.chunk(3), self.attention_output, self.widen, self.narrow
        ]  # fmt: skip


class FusedLayers(FusedStack):
    """Layers of BERT's kind."""

    _layers: list[LayerCopies]

    def _uncalled(self) -> Iterable[nn.Module]:
        return (module for module in self._stack.modules() if module is not self._stack)

    def _copies(self, model: nn.Module) -> list[LayerCopies]:
        self._context = context_of(model)
        self._rows = row_attention(self._stack, self._context) if anatomy_of(model).family.relative else None
        self._layers = [LayerCopies(parts, self.dtype) for parts in parts_of(model)]
        return self._layers

    def _forward(self, hidden_states: torch.Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Any:
        """Packed batches fused; others, and all while a hook listens to a layer, as transformers runs them."""
        packed = self._context.layout if layout is None else layout
        if packed is None or self._is_watched():
            given = kwargs if layout is None else {**kwargs, "layout": layout}
            return type(self._stack).forward(self._stack, hidden_states, *args, **given)
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

        with torch.autocast(hidden_states.device.type, enabled=False):
            out = self._run(hidden_states.squeeze(0), packed).unsqueeze(0)
        states = (out,) if isinstance(self._rows, DebertaRows) else None  # whose model reads the last of them
        return Output(last_hidden_state=out, hidden_states=states)

    def _run(self, residual: torch.Tensor, layout: Layout) -> torch.Tensor:
        training = self._stack.training
        seeds = self._prepare(3 * len(self._layers), residual.device)
        x = residual.to(self.dtype)
        last = len(self._layers) - 1
        distances = None if self._rows is None else (self._rows, self._rows.shared(residual, layout))
        if isinstance(self._rows, MpnetRows) and distances is not None and distances[1] is not None:
            distances = self._rows, distances[1].contiguous()
        for number, layer in enumerate(self._layers):
            first_only = self.first_token_only and number == last
            residual, x = _run_layer(
                layer, residual, x, layout, first_only=first_only, training=training, seeds=seeds, call=3 * number,
                distances=distances,
            )  # fmt: skip
        return residual


def _run_layer(
    layer: LayerCopies, residual: torch.Tensor, x: torch.Tensor, layout: Layout, *,
    first_only: bool, training: bool, seeds: torch.Tensor, call: int, distances: Distances | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer: the residual stream as it is stored and as products take it."""
    parts = layer.parts
    context, residual = _attend(
        layer, residual, x, layout, first_only=first_only, training=training, seeds=seeds, call=call,
        distances=distances,
    )  # fmt: skip
    h = linear(context, layer.attention_output, None, parts.attention_output.weight)
    drop = probability(parts.drop_attention, training)
    residual, x = add_norm(
        h, parts.attention_output.bias, residual, parts.attention_norm, drop=drop, seeds=seeds, call=call + 1
    )
    h = gelu_linear(
        linear(x, layer.widen, None, parts.widen.weight), parts.widen.bias, layer.narrow, parts.narrow.weight
    )
    drop = probability(parts.drop_output, training)
    return add_norm(h, parts.narrow.bias, residual, parts.output_norm, drop=drop, seeds=seeds, call=call + 2)


def _attend(
    layer: LayerCopies, residual: torch.Tensor, x: torch.Tensor, layout: Layout, *,
    first_only: bool, training: bool, seeds: torch.Tensor, call: int, distances: Distances | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(what attention makes of x, the residual that goes with it: all tokens, or the first ones)."""
    parts = layer.parts
    width, drop = parts.query.out_features, probability(parts.drop_weights, training)
    placed = None
    if distances is not None and isinstance(distances[0], DebertaRows) and distances[1] is not None:
        placed = distances[0].distances(parts.attention, distances[1], training=training).to(x.dtype)
    asking = x
    if first_only:
        residual, asking = residual.index_select(0, layout.starts), x.index_select(0, layout.starts)
    q, packed = _project(layer, asking if first_only else None, x, placed)
    if distances is None:
        out = attend_fused(q, packed, layout, scale=parts.attention.scaling, drop=drop, seeds=seeds, call=call)
    elif q is None and attends_fused(packed, layout):
        out = _attend_in_kernels(distances, parts, packed, layout, drop=drop, seeds=seeds, call=call)
    else:
        counts = asking.shape[0], x.shape[0]
        out = _attend_by_distance(distances, parts, q, packed, counts, drop=drop, first_only=first_only)
    return out.reshape(-1, width), residual


def _project(
    layer: LayerCopies, firsts: torch.Tensor | None, x: torch.Tensor, placed: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(queries of first tokens or None, (tokens, 3 or 2, heads, size): query, key, value, or key and value of every token).

    What belongs to distances is projected with the tokens, by the same matrices in the same product, and lies behind them.
    """
    width = layer.parts.query.out_features
    shape = (layer.parts.heads, width // layer.parts.heads)
    x = x if placed is None else torch.cat([x, placed])
    if firsts is None:
        return None, linear(x, layer.qkv, layer.qkv_bias, *layer.three).view(-1, 3, *shape)
    firsts = firsts if placed is None else torch.cat([firsts, placed])
    (q_w, k_w, v_w, q_b, k_b, v_b) = layer.three
    q = linear(firsts, layer.qkv[:width], layer.qkv_bias[:width], q_w, q_b).view(-1, *shape)
    both = linear(x, layer.qkv[width:], layer.qkv_bias[width:], k_w, v_w, k_b, v_b)
    return q, both.view(-1, 2, *shape)


def _attend_in_kernels(
    distances: Distances, parts: LayerParts, packed: torch.Tensor, layout: Layout, *, drop: float, seeds: torch.Tensor,
    call: int,
) -> torch.Tensor:  # fmt: skip
    """The same as `_attend_by_distance` for all tokens, in kernels of our own."""
    rows, shared = distances
    options: dict[str, Any] = {"drop": drop, "seeds": seeds, "call": call}
    if not isinstance(rows, DebertaRows):
        return attend_by_distance(packed, layout, bias=shared, scale=packed.shape[-1] ** -0.5, **options)
    options["scale"] = rows.scale(parts.attention, packed.shape[-1])
    if shared is None:
        return attend_by_distance(packed, layout, **options)
    far = 2 * layout.longest - 1
    tokens, placed = packed.split_with_sizes([packed.shape[0] - far, far])
    asked, (by_query, by_key, _) = parts.attention.pos_att_type, placed.transpose(0, 2).unbind(1)
    as_keys = by_key.contiguous() if "c2p" in asked else None
    as_queries = by_query.flip(1) if "p2c" in asked else None
    return attend_by_distance(tokens, layout, as_keys=as_keys, as_queries=as_queries, **options)


def _attend_by_distance(
    distances: Distances, parts: LayerParts, firsts: torch.Tensor | None, packed: torch.Tensor, counts: tuple[int, int],
    *, drop: float, first_only: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention with scores that know how far apart tokens are; `counts`: queries and keys that are tokens."""
    rows, shared = distances
    q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
    queries, keys = counts
    given = parts.attention, q[:queries], k[:keys], v[:keys]
    if not isinstance(rows, DebertaRows):
        assert shared is not None
        return rows.attend(*given, shared, drop=drop, first_only=first_only)
    asked = parts.attention.pos_att_type if shared is not None else ()
    by_key = k[keys:].flatten(1) if "c2p" in asked else None
    by_query = q[queries:].flatten(1) if "p2c" in asked else None
    return rows.attend_with(*given, by_key, by_query, drop=drop, first_only=first_only)
