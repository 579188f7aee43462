"""ModernBERT's layers in half precision with few, fused kernels: norms before the parts, rotary positions, gated feed-forward.

Each piece takes as few passes over memory as it needs; triton where it is present, torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.speedups.fused_attention import attend_fused
from tunesmith.speedups.fused_layers import FusedLayers
from tunesmith.speedups.fused_ops import linear, side_stream, sum_rows, weight_gradient
from tunesmith.speedups.fused_stack import FusedStack, probability
from tunesmith.speedups.packing import Layout
from tunesmith.training.distributed import has_triton


class _SumNorm(torch.autograd.Function):
    """(residual + dropout(h), its LayerNorm), or the norm alone; what is dropped is drawn again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float,
        drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, with_total: bool, keep: bool,
    ) -> Any:  # fmt: skip
        from tunesmith.speedups.modern_kernels import sum_norm_forward

        total, out, unit, rstd = sum_norm_forward(
            h, residual, gamma, beta, eps=eps, drop=drop, seeds=seeds, call=call, dtype=dtype, with_total=with_total, keep=keep
        )  # fmt: skip
        ctx.save_for_backward(unit, gamma, rstd, seeds)
        ctx.options = {"drop": drop, "call": call, "stored": residual.dtype, "with_beta": beta is not None}
        ctx.parameters = (gamma,) if beta is None else (gamma, beta)
        return (total, out) if with_total else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        from tunesmith.speedups.modern_kernels import sum_norm_backward

        unit, gamma, rstd, seeds = ctx.saved_tensors
        d_total = given[0].contiguous() if len(given) == 2 else None
        d_h, d_residual, sums = sum_norm_backward(
            d_total, given[-1].contiguous(), unit, gamma, rstd, seeds=seeds, **ctx.options
        )
        d_gamma = d_beta = None
        if any(ctx.needs_input_grad[2:4]):
            with side_stream.after(sums, parameters=ctx.parameters):
                d_gamma, *rest = sum_rows(sums).unbind(0)
            d_gamma = d_gamma if ctx.needs_input_grad[2] else None
            d_beta = rest[0] if ctx.needs_input_grad[3] else None
        return d_h, d_residual, d_gamma, d_beta, None, None, None, None, None, None, None


def sum_norm(
    h: torch.Tensor, residual: torch.Tensor, norm: nn.LayerNorm, *, drop: float, seeds: torch.Tensor, call: int, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(residual + dropout(h) as the residual is stored, its LayerNorm in the type of `h`); `last`: the norm alone, twice, as
    the residual is stored. `seeds[call]` says which values are dropped; where triton is missing torch's generator does."""
    if h.device.type == "cuda" and has_triton():
        given = (h, residual, norm.weight, norm.bias, norm.eps, drop, seeds, call, residual.dtype if last else h.dtype)
        out = _SumNorm.apply(*given, not last, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return (out, out) if last else out
    total = residual + functional.dropout(h, drop)
    normed = functional.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return (normed, normed) if last else (total, normed.to(h.dtype))


class _GegluLinear(torch.autograd.Function):
    """dropout(GELU(values) * gates) @ weight.T. The activation is computed again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor, drop: float, seeds: torch.Tensor, call: int
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.modern_kernels import geglu_forward

        ctx.save_for_backward(x, weight, seeds)
        ctx.parameter, ctx.options = parameter, {"drop": drop, "call": call}
        return geglu_forward(x, seeds=seeds, **ctx.options) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.modern_kernels import geglu_backward

        x, weight, seeds = ctx.saved_tensors
        active, d_x = geglu_backward(d_out @ weight, x, seeds=seeds, **ctx.options)
        d_weight = None
        if ctx.needs_input_grad[2]:
            with side_stream.after(d_out, active, parameters=(ctx.parameter,)):
                d_weight = weight_gradient(d_out, active)
        return d_x, None, d_weight, None, None, None


def geglu_linear(
    x: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor, *, drop: float, seeds: torch.Tensor, call: int
) -> torch.Tensor:
    """dropout(GELU(values) * gates) @ weight.T of x, (tokens, 2 width): values, then gates; `weight` is a copy of `parameter`."""
    if x.device.type == "cuda" and has_triton():
        out: torch.Tensor = _GegluLinear.apply(x, weight, parameter, drop, seeds, call)  # type: ignore[no-untyped-call]
        return out
    value, gate = x.chunk(2, dim=-1)
    return linear(functional.dropout(functional.gelu(value) * gate, drop), weight, None, parameter)


class _Rotate(torch.autograd.Function):
    """Queries and keys turned by the angles of their positions where they lie; the gradient by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
        from tunesmith.speedups.modern_kernels import rotate_in_place

        rotate_in_place(packed, cos, sin, heads, back=False)
        ctx.mark_dirty(packed)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.modern_kernels import rotate_in_place

        cos, sin = ctx.saved_tensors
        d_packed = d_out.contiguous()  # made by the attention's backward pass for this one reader: turned where it lies
        rotate_in_place(d_packed, cos, sin, ctx.heads, back=True)
        return d_packed, None, None, None


def rotated(packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """(tokens, 3, heads, size) from (tokens, 3 heads size), with queries and keys turned by angles given as (tokens, size).

    `packed` may be written to.
    """
    size = cos.shape[1]
    if packed.device.type == "cuda" and has_triton():
        turned: torch.Tensor = _Rotate.apply(packed, cos.contiguous(), sin.contiguous(), heads)  # type: ignore[no-untyped-call]
        return turned.view(-1, 3, heads, size)
    both, values = packed.view(-1, 3, heads, size).split_with_sizes([2, 1], 1)
    exact, half = both.float(), size // 2
    swapped = torch.cat([-exact[..., half:], exact[..., :half]], -1)
    turned = exact * cos[:, None, None] + swapped * sin[:, None, None]
    return torch.cat([turned.to(packed.dtype), values], 1)


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
