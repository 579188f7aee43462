"""The pieces of ModernBERT's layers with as few passes over memory as they need; triton where it is, torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.fast.fused_ops import has_triton, linear, side_stream, sum_rows, weight_gradient


class _SumNorm(torch.autograd.Function):
    """(residual + dropout(h), its LayerNorm), or the norm alone; what is dropped is drawn again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float,
        drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, with_total: bool, keep: bool,
    ) -> Any:  # fmt: skip
        from tunesmith.fast.modern_kernels import sum_norm_forward

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
        from tunesmith.fast.modern_kernels import sum_norm_backward

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
        from tunesmith.fast.modern_kernels import geglu_forward

        ctx.save_for_backward(x, weight, seeds)
        ctx.parameter, ctx.options = parameter, {"drop": drop, "call": call}
        return geglu_forward(x, seeds=seeds, **ctx.options) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.fast.modern_kernels import geglu_backward

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
        from tunesmith.fast.modern_kernels import rotate_in_place

        rotate_in_place(packed, cos, sin, heads, back=False)
        ctx.mark_dirty(packed)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.fast.modern_kernels import rotate_in_place

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
