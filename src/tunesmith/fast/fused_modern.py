"""ModernBERT's layers in half precision with few, fused kernels: norms before the parts, rotary positions, gated feed-forward."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from tunesmith.fast.fused_attention import attend_fused
from tunesmith.fast.fused_layers import FusedLayers
from tunesmith.fast.fused_ops import linear
from tunesmith.fast.fused_stack import FusedStack, probability
from tunesmith.fast.modern_ops import geglu_linear, rotated, sum_norm
from tunesmith.fast.packing import Layout

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of (tokens, head size)."""


class ModernCopies:
    """The matrices of one layer in the type that products are computed in."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer = layer
        self.copied = tuple(m.weight for m in (layer.attn.Wqkv, layer.attn.Wo, layer.mlp.Wi, layer.mlp.Wo))
        self.targets = tuple(torch.empty_like(weight, dtype=dtype) for weight in self.copied)


class FusedModern(FusedStack):
    """The whole bare model, which has embeddings, layers and the last norm in one forward; embeddings are called as they are."""

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
        """Packed batches fused; others, and all while a hook listens to a layer, as transformers runs them."""
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
        x = residual.to(self.dtype)  # the first layer has no norm of its own before its attention
        following = [*(layer.attn_norm for layer in self._stack.layers[1:]), self._stack.final_norm]
        for number, (copies, norm) in enumerate(zip(self._layers, following, strict=True)):
            last = number == len(self._layers) - 1
            residual, x = _run_layer(
                copies, norm, residual, x, layout, angles[copies.layer.attention_type], training=self._stack.training,
                last=last, seeds=seeds, call=3 * number,
            )  # fmt: skip
        return residual


def _run_layer(
    copies: ModernCopies, norm: nn.LayerNorm, residual: torch.Tensor, x: torch.Tensor, layout: Layout, angles: Angles, *,
    training: bool, last: bool, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer, and the norm that follows it: the residual stream, and its norm as products take it; at the end, the norm."""
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
    """Fused layers of the kind that this model has."""
    kind = FusedModern if getattr(model.config, "model_type", None) == "modernbert" else FusedLayers
    return kind(model, dtype, first_token_only=first_token_only)
