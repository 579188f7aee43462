"""Attention of a packed batch from query, key and value in one tensor: triton where it is and pays, torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tunesmith.fast.attention import attend_packed, binding
from tunesmith.fast.fused_ops import has_triton
from tunesmith.fast.packing import Layout

LONGEST = 256
"""Flash attention's larger tiles pay for longer rows."""


class _Attention(torch.autograd.Function):
    """One kernel each way. The gradient comes back in one tensor, as it came: nothing is put together again."""

    @staticmethod
    def forward(
        ctx: Any, firsts: torch.Tensor | None, packed: torch.Tensor, layout: Layout, scale: float, drop: float,
        seeds: torch.Tensor, call: int, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.fast.attention_kernels import attention_forward

        bounds = layout.bounds if firsts is None else torch.arange(
            layout.bounds.shape[0], dtype=torch.int32, device=packed.device
        )  # fmt: skip
        q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call, "window": window}
        longest = layout.longest if firsts is None else 1
        out, lse = attention_forward(q, k, v, bounds, layout.bounds, q_longest=longest, **options)  # type: ignore[arg-type]
        ctx.save_for_backward(firsts, packed, bounds, layout.bounds, out, lse, seeds)
        ctx.longest, ctx.options = layout.longest, {k: v for k, v in options.items() if k != "seeds"}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.fast.attention_kernels import attention_backward

        firsts, packed, q_bounds, k_bounds, out, lse, seeds = ctx.saved_tensors
        d_packed = torch.empty_like(packed)
        if firsts is None:
            d_firsts = None
            (q, k, v), into = packed.unbind(1), d_packed.unbind(1)
        else:
            d_firsts = torch.empty_like(firsts)
            q, (k, v), into = firsts, packed.unbind(1), (d_firsts, *d_packed.unbind(1))
        attention_backward(
            d_out.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            into,
            q_bounds,
            k_bounds,
            longest=ctx.longest,
            seeds=seeds,
            **ctx.options,
        )
        return d_firsts, d_packed, None, None, None, None, None, None


def attend_fused(
    firsts: torch.Tensor | None, packed: torch.Tensor, layout: Layout, *,
    scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, size) from `packed`, (tokens, 3, heads, size): query, key, value of every token.

    With `firsts`, (stretches, heads, size), the queries are those of first tokens, and `packed` holds keys and values.
    With `window` a token sees those at most so far from it.
    """
    window = binding(window, layout)
    size = packed.shape[-1]
    if packed.device.type == "cuda" and has_triton() and layout.longest <= LONGEST and size in (16, 32, 64, 128):
        out: torch.Tensor = _Attention.apply(firsts, packed, layout, scale, drop, seeds, call, window)  # type: ignore[no-untyped-call]
        return out
    q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
    return attend_packed(q, k, v, layout, scale, drop, firsts is not None, window)
