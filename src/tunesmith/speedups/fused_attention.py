"""Attention of a packed batch in few kernels each way, for fused layers: from query, key and value in one tensor, and by
distances for MPNet and DeBERTa. Triton where it is present and pays, torch elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tunesmith.speedups.attention import attend_packed, binding
from tunesmith.speedups.packing import Layout
from tunesmith.training.distributed import has_triton

LONGEST_FUSED = 256
LONGEST_OF_FEW, FEW_TOKENS = 512, 4096
"""Flash attention's larger tiles pay for longer rows where these are many: its backward pass in one order takes longer (decision
0126: a step of 3,072 tokens in rows of 260 to 420 takes 6.84 ms with it and 6.27 with the kernels here, one of 14,848 tokens
in rows of up to 512 takes 22.7 and 24.4)."""


class _Attention(torch.autograd.Function):
    """One kernel each way. The gradient comes back in one tensor, as it came: nothing is put together again."""

    @staticmethod
    def forward(
        ctx: Any, firsts: torch.Tensor | None, packed: torch.Tensor, layout: Layout, scale: float, drop: float,
        seeds: torch.Tensor, call: int, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.attention_kernels import attention_forward

        bounds = layout.bounds if firsts is None else torch.arange(
            layout.bounds.shape[0], dtype=torch.int32, device=packed.device
        )  # fmt: skip
        q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call, "window": window}
        longest = {"longest": layout.longest, "q_longest": layout.longest if firsts is None else 1}
        out, lse = attention_forward(q, k, v, bounds, layout.bounds, **longest, **options)  # type: ignore[arg-type]
        ctx.save_for_backward(firsts, packed, bounds, layout.bounds, out, lse, seeds)
        ctx.longest, ctx.options = layout.longest, {k: v for k, v in options.items() if k != "seeds"}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.attention_kernels import attention_backward

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
    longest = LONGEST_OF_FEW if packed.shape[0] <= FEW_TOKENS else LONGEST_FUSED
    if packed.device.type == "cuda" and has_triton() and layout.longest <= longest and size in (16, 32, 64, 128):
        out: torch.Tensor = _Attention.apply(firsts, packed, layout, scale, drop, seeds, call, window)  # type: ignore[no-untyped-call]
        return out
    q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
    return attend_packed(q, k, v, layout, scale, drop, firsts is not None, window)


LONGEST_BY_DISTANCE = 1024
"""Longer rows have more scores than a program holds."""


class _DistanceAttention(torch.autograd.Function):
    """Rows side by side for the products alone; queries, keys and values are laid again for the backward pass, not kept."""

    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, as_keys: torch.Tensor | None, as_queries: torch.Tensor | None,
        bias: torch.Tensor | None, layout: Layout, scale: float, drop: float, seeds: torch.Tensor, call: int,
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.row_kernels import gather_stretches, spread_stretches, weigh_scores

        q, k, v = spread_stretches(packed, layout.bounds, layout.longest).unbind(0)
        near = _by_distance(packed, 0, as_keys), _by_distance(packed, 1, as_queries)
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call}
        scores = q @ k.transpose(-1, -2)
        plain, weights = weigh_scores(scores, *near, bias, layout.bounds, **options)  # type: ignore[arg-type]
        ctx.save_for_backward(packed, as_keys, as_queries, plain, weights, seeds, layout.bounds)
        ctx.options = {k: v for k, v in options.items() if k != "seeds"}
        return gather_stretches((weights @ v).unsqueeze(0), layout.bounds, packed.shape[0]).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.row_kernels import gather_stretches, spread_stretches, weigh_scores_backward

        packed, as_keys, as_queries, plain, weights, seeds, bounds = ctx.saved_tensors
        tokens, longest = packed.shape[0], plain.shape[-1]
        q, k, v = spread_stretches(packed, bounds, longest).unbind(0)
        d_rows = spread_stretches(d_out.contiguous().unsqueeze(1), bounds, longest)[0]
        d_scores, d_by_key, d_by_query = weigh_scores_backward(
            d_rows @ v.transpose(-1, -2), plain, bounds, tokens,
            key=as_keys is not None, query=as_queries is not None, seeds=seeds, **ctx.options,
        )  # fmt: skip
        d_three = q.new_empty(3, *q.shape)
        torch.matmul(d_scores, k, out=d_three[0])
        torch.matmul(d_scores.transpose(-1, -2), q, out=d_three[1])
        torch.matmul(weights.transpose(-1, -2), d_rows, out=d_three[2])
        d_packed = gather_stretches(d_three, bounds, tokens)
        d_keys = _to_table(d_packed, packed, 0, as_keys, d_by_key)
        d_queries = _to_table(d_packed, packed, 1, as_queries, d_by_query)
        d_bias = d_scores.sum(1, dtype=torch.float32) / ctx.options["scale"] if ctx.needs_input_grad[3] else None
        return d_packed, d_keys, d_queries, d_bias, None, None, None, None, None


def _by_distance(packed: torch.Tensor, kind: int, table: torch.Tensor | None) -> torch.Tensor | None:
    """(heads, tokens, distances): queries (kind 0) or keys (1) of the tokens times the table of distances."""
    return None if table is None else packed[:, kind].transpose(0, 1) @ table.transpose(1, 2)


def _to_table(
    d_packed: torch.Tensor, packed: torch.Tensor, kind: int, table: torch.Tensor | None, d_near: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of the table; that of the tokens is added where it belongs."""
    if table is None or d_near is None:
        return None
    d_packed[:, kind] += (d_near @ table).transpose(0, 1)
    return d_near.transpose(1, 2) @ packed[:, kind].transpose(0, 1)


def attends_fused(packed: torch.Tensor, layout: Layout) -> bool:
    """Whether the kernels take this batch."""
    return packed.device.type == "cuda" and has_triton() and layout.longest <= LONGEST_BY_DISTANCE


def attend_by_distance(
    packed: torch.Tensor, layout: Layout, *, as_keys: torch.Tensor | None = None, as_queries: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, scale: float, drop: float, seeds: torch.Tensor, call: int,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, size) from query, key and value of every token, (tokens, 3, heads, size).

    Scores are (q k + q as_keys + k as_queries) * scale + bias. `as_keys` is (heads, 2 longest - 1, size), at longest - 1 - i + j
    what the query at place i meets for the key at place j; `as_queries` at longest - 1 - j + i what that key meets for that
    query; `bias` is (heads, longest, longest) in float32.
    """
    out: torch.Tensor = _DistanceAttention.apply(  # type: ignore[no-untyped-call]
        packed.contiguous(), as_keys, as_queries, bias, layout, scale, drop, seeds, call
    )
    return out
