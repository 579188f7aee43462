"""Fused encoder layers: the parts of a layer under transformers' names, half-precision copies of its matrices, and a forward pass
that replaces transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from tunesmith.models.families import anatomy_of, hook_tables, is_watched, why_not
from tunesmith.speedups.fused_ops import (
    add_norm,
    attend_by_distance,
    attend_fused,
    attends_fused,
    geglu_linear,
    gelu_linear,
    linear,
    rotated,
    sum_norm,
)
from tunesmith.speedups.packing import Layout
from tunesmith.speedups.relative import DebertaRows, MpnetRows, RowAttention, context_of, row_attention


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of a layer: self-attention, its norm, feed-forward, its norm, and the dropout after each (None: without)."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm
    widen: nn.Linear
    narrow: nn.Linear
    output_norm: nn.LayerNorm
    heads: int
    attention: Any
    """The module with the factor of the scores (`scaling`); for relative attention, the module that knows the distances."""
    drop_weights: nn.Dropout
    drop_attention: nn.Dropout | None
    drop_output: nn.Dropout


def _like_bert(layer: Any) -> LayerParts:
    own, after = layer.attention.self, layer.attention.output
    return LayerParts(
        own.query, own.key, own.value, after.dense, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


def _like_distilbert(layer: Any) -> LayerParts:
    own = layer.attention
    return LayerParts(
        own.q_lin, own.k_lin, own.v_lin, own.out_lin, layer.sa_layer_norm,
        layer.ffn.lin1, layer.ffn.lin2, layer.output_layer_norm,
        own.n_heads, own, own.dropout, None, layer.ffn.dropout,
    )  # fmt: skip


def _like_mpnet(layer: Any) -> LayerParts:
    own, after = layer.attention.attn, layer.attention
    return LayerParts(
        own.q, own.k, own.v, own.o, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


def _like_deberta(layer: Any) -> LayerParts:
    own, after = layer.attention.self, layer.attention.output
    return LayerParts(
        own.query_proj, own.key_proj, own.value_proj, after.dense, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


_KINDS = {
    "bert": _like_bert,
    "electra": _like_bert,
    "roberta": _like_bert,
    "xlm-roberta": _like_bert,
    "camembert": _like_bert,
    "distilbert": _like_distilbert,
    "mpnet": _like_mpnet,
    "deberta-v2": _like_deberta,
}


def parts_of(model: nn.Module) -> list[LayerParts]:
    """Return the parts of each layer of a model that `why_not_fused` accepts."""
    anatomy = anatomy_of(model)
    assert anatomy.family.layers is not None
    read = _KINDS[str(model.config.model_type)]  # type: ignore[union-attr]
    return [read(layer) for layer in getattr(anatomy.stack, anatomy.family.layers)]


def why_not_fused(model: nn.Module) -> str | None:
    """Return why the layers of this model can't run fused; None if they can."""
    reason = why_not(model)
    if reason:
        return reason
    config: Any = model.config
    if config.model_type == "albert":
        return "the layers of albert share one set of modules"
    if config.model_type not in (*_KINDS, "modernbert"):
        return f"the layers of {config.model_type} are not of BERT's kind"
    if getattr(config, "relative_attention", False) and not getattr(config, "share_att_key", False):
        return "it has separate projections of distances"
    names = ("hidden_act", "hidden_activation", "activation")
    activation = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    if activation != "gelu":
        return f"its activation is {activation}, not gelu"
    stack = anatomy_of(model).stack
    parameters = list(stack.named_parameters(remove_duplicate=False))
    if len({id(p) for _, p in parameters}) < len(parameters):
        return "its layers share parameters"
    if any(p.dtype != torch.float32 for _, p in parameters):
        return "its weights are not float32"
    if config.model_type == "modernbert":
        biased = any(m.bias is not None for m in stack.modules() if isinstance(m, nn.Linear))
        return "its projections have biases" if biased else None
    if any(m.bias is None for m in stack.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))):
        return "a layer has no bias"
    return None


class Copies(Protocol):
    """The parameters of one layer, and the half-precision copies that matmuls read."""

    @property
    def copied(self) -> Sequence[torch.Tensor]:
        """Return the parameters."""

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Return their copies."""


class FusedStack:
    """The fused layers of one model; `why_not_fused` must be None. `disable` restores the model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, first_token_only: bool) -> None:
        self.dtype, self.first_token_only = dtype, first_token_only
        self._stack: Any = anatomy_of(model).stack
        self._inner = list(self._uncalled())
        self._listeners = hook_tables(self._inner)
        copies = self._copies(model)
        self._targets = [t for layer in copies for t in layer.targets]
        self._copied = [p for layer in copies for p in layer.copied]
        self._seen: list[tuple[int, int]] = []
        self.kept_fresh = False
        """Set if only the fused optimizer kernel, which also updates the copies, writes weights between steps."""
        self._replacement = self._forward  # one object: a new one would count as a change of the model
        self.enable()

    def _uncalled(self) -> Iterable[nn.Module]:
        """Return the modules that are computed without being called."""
        raise NotImplementedError

    def _copies(self, model: nn.Module) -> Sequence[Copies]:
        """Return the copies of each layer."""
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward pass of the layers."""
        raise NotImplementedError

    @property
    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the parameters that have a copy, with their copies."""
        return dict(zip(self._copied, self._targets, strict=True))

    def enable(self) -> None:
        """Replace the forward pass by the fused one."""
        self._stack.forward = self._replacement

    def disable(self) -> None:
        """Restore the original forward pass."""
        vars(self._stack).pop("forward", None)

    def refresh_if_changed(self) -> None:
        """Update the copies if anything other than the optimizer kernel changed or replaced the weights."""
        seen = [(p._version, p.data_ptr()) for p in self._copied]
        if seen != self._seen:
            self._refresh()
            self._seen = seen

    def _refresh(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._copied)

    def _prepare(self, calls: int, device: torch.device) -> torch.Tensor:
        """Update the copies; return one seed for each call that applies dropout."""
        if self.kept_fresh:
            self.refresh_if_changed()
        else:  # copied again each time: a write through `.data` leaves no sign
            self._refresh()
        # From torch's generator, which is seeded for the step: dropout is a function of the step.
        return torch.randint(2**62, (calls,), device=device) if self._stack.training else self._targets[0]

    def _is_watched(self) -> bool:
        """Return whether hooks of the user, or ours that look for NaN or inf, listen to a layer."""
        return any(module._forward_hooks for module in self._inner) or is_watched(self._listeners)


def probability(dropout: nn.Module | None, training: bool) -> float:
    """Return the current dropout rate."""
    return dropout.p if training and isinstance(dropout, nn.Dropout) else 0.0


Distances = tuple[RowAttention, "torch.Tensor | None"]
"""Attention by distances, and what the layers of a step share for it."""


class LayerCopies:
    """The matrices of one layer in half precision; query, key and value are one matrix."""

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
    """Post-norm layers as in BERT."""

    _layers: list[LayerCopies]

    def _uncalled(self) -> Iterable[nn.Module]:
        return (module for module in self._stack.modules() if module is not self._stack)

    def _copies(self, model: nn.Module) -> list[LayerCopies]:
        self._context = context_of(model)
        self._rows = row_attention(self._stack, self._context) if anatomy_of(model).family.relative else None
        self._layers = [LayerCopies(parts, self.dtype) for parts in parts_of(model)]
        return self._layers

    def _forward(self, hidden_states: torch.Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Any:
        """Run packed batches fused. Other batches, and all batches while a hook listens to a layer, run as in transformers."""
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
    """Run one layer; return the residual stream as it is stored and in half precision."""
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
    """Return the attention output, and the residual that belongs to it: of all tokens, or of the first ones."""
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
    """Project the input: return the queries of first tokens (or None), and query, key and value of every token as
    (tokens, 3 or 2, heads, size).

    Embeddings of distances are appended to the tokens and projected in the same matmul.
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
    """Compute `_attend_by_distance` for all tokens with our own kernels."""
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
    """Compute attention with scores that depend on distances; `counts` are the numbers of queries and keys that are tokens."""
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


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (tokens, head size)."""


class ModernCopies:
    """The matrices of one layer in half precision."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer = layer
        self.copied = tuple(m.weight for m in (layer.attn.Wqkv, layer.attn.Wo, layer.mlp.Wi, layer.mlp.Wo))
        self.targets = tuple(torch.empty_like(weight, dtype=dtype) for weight in self.copied)


class FusedModern(FusedStack):
    """ModernBERT, whose embeddings, layers and last norm are one forward pass; the embeddings are called as they are."""

    def _uncalled(self) -> Iterable[nn.Module]:
        return chain(self._stack.layers.modules(), [self._stack.final_norm])

    def _copies(self, model: nn.Module) -> list[ModernCopies]:
        self._layers = [ModernCopies(layer, self.dtype) for layer in self._stack.layers]
        return self._layers

    def _forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run packed batches fused. Other batches, and all batches while a hook listens to a layer, run as in transformers."""
        layout: Layout | None = kwargs.get("layout")
        asked = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if layout is None or position_ids is None or asked or self._is_watched():
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
            return type(self._stack).forward(self._stack, input_ids, **given, **kwargs)
        from transformers.modeling_outputs import BaseModelOutput

        hidden = self._stack.embeddings(input_ids=input_ids, inputs_embeds=inputs_embeds)
        with torch.autocast(hidden.device.type, enabled=False):
            angles = {
                kind: self._stack.rotary_emb(hidden, position_ids, kind)
                for kind in dict.fromkeys(layer.attention_type for layer in self._stack.layers)
            }
            flat = {kind: (cos.squeeze(0), sin.squeeze(0)) for kind, (cos, sin) in angles.items()}
            out = self._run(hidden.squeeze(0), layout, flat).unsqueeze(0)
        return BaseModelOutput(last_hidden_state=out)

    def _run(self, residual: torch.Tensor, layout: Layout, angles: dict[str, Angles]) -> torch.Tensor:
        seeds = self._prepare(3 * len(self._layers), residual.device)
        x = residual.to(self.dtype)  # the first layer has no norm before its attention
        following = [*(layer.attn_norm for layer in self._stack.layers[1:]), self._stack.final_norm]
        for number, (copies, norm) in enumerate(zip(self._layers, following, strict=True)):
            last = number == len(self._layers) - 1
            residual, x = _run_modern_layer(
                copies, norm, residual, x, layout, angles[copies.layer.attention_type], training=self._stack.training,
                last=last, seeds=seeds, call=3 * number,
            )  # fmt: skip
        return residual


def _run_modern_layer(
    copies: ModernCopies, norm: nn.LayerNorm, residual: torch.Tensor, x: torch.Tensor, layout: Layout, angles: Angles, *,
    training: bool, last: bool, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run one layer and the norm that follows it; return the residual stream and its norm, at the end only the norm."""
    attn, mlp = copies.layer.attn, copies.layer.mlp
    (qkv, attention_output, widen, narrow), weights = copies.targets, copies.copied
    heads = attn.config.num_attention_heads
    packed = rotated(linear(x, qkv, None, weights[0]), *angles, heads)
    window = None if attn.sliding_window is None else attn.sliding_window - 1
    drop = attn.attention_dropout if training else 0.0
    scale = attn.head_dim**-0.5
    context = attend_fused(None, packed, layout, scale=scale, drop=drop, seeds=seeds, call=call, window=window)
    h = linear(context.reshape(-1, heads * attn.head_dim), attention_output, None, weights[1])
    residual, x = sum_norm(
        h, residual, copies.layer.mlp_norm, drop=probability(attn.out_drop, training), seeds=seeds, call=call + 1, last=False
    )  # fmt: skip
    h = geglu_linear(
        linear(x, widen, None, weights[2]), narrow, weights[3],
        drop=probability(mlp.drop, training), seeds=seeds, call=call + 2,
    )  # fmt: skip
    return sum_norm(h, residual, norm, drop=0.0, seeds=seeds, call=call + 2, last=last)


def fuse_layers(model: nn.Module, dtype: torch.dtype, *, first_token_only: bool) -> FusedStack:
    """Return the fused layers for this kind of model."""
    kind = FusedModern if getattr(model.config, "model_type", None) == "modernbert" else FusedLayers
    return kind(model, dtype, first_token_only=first_token_only)
