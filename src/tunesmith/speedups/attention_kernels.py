"""Attention of packed stretches as GPU kernels, for rows far shorter than a tile of flash attention's (triton).

Flash attention works in tiles of 128 by 128; a row of 50 tokens fills a sixth of one. Here tiles are 64 by 64, the backward
pass is one kernel, and what is dropped is drawn again instead of kept. Softmax is in float32, products in the type given.
Where there are many rows, `short_rows` does those that fit into one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.speedups.short_rows import (
    LONGEST,
    kept_pairs,
    load_rows,
    sees,
    short_backward,
    short_forward,
    store_rows,
)

_TILE = 64
_MANY = 400
"""Pairs of row and head that fill a GPU's multiprocessors three times over."""


@triton.jit
def _first_tile(block, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Where the first tile begins that something in this one sees, or is seen from."""
    return tl.maximum(block * TILE - reach, 0) // TILE * TILE if NEAR else 0


@triton.jit
def _end(block, length, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Where the tiles end that something in this one sees, or is seen from."""
    return tl.minimum((block + 1) * TILE + reach, length) if NEAR else length


@triton.jit(do_not_specialize=["call"])
def _forward(
    q, k, v, out, lse, seeds, q_bounds, k_bounds, call, scale, drop, q_stride, k_stride, heads, reach, low,
    D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    stretch, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
    if (block * TILE >= q_length) | (k_length <= low):
        return
    row = block * TILE + tl.arange(0, TILE)
    queries = load_rows(q, q_first, row, q_length, q_stride, head, D)
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, D), tl.float32)
    for start in range(_first_tile(block, reach, TILE, NEAR), _end(block, k_length, reach, TILE, NEAR), TILE):
        column = start + tl.arange(0, TILE)
        keys = load_rows(k, k_first, column, k_length, k_stride, head, D)
        values = load_rows(v, k_first, column, k_length, k_stride, head, D)
        # A query that sees nothing of its first tiles takes what it sees later for infinitely more.
        seen = sees(row, column, k_length, reach, NEAR)
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys)) * scale, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        share = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(share, 1)
        if DROP:
            kept = kept_pairs(tl.load(seeds + call), q_first, row, column, head, heads, drop)
            share = tl.where(kept, share * (1.0 / (1.0 - drop)), 0.0)
        result = result * fade[:, None] + tl.dot(share.to(values.dtype), values)
        top = higher
    store_rows(out, result / total[:, None], q_first, row, q_length, heads * D, head, D)
    tl.store(lse + (q_first + row) * heads + head, top + tl.log(total), mask=row < q_length)


@triton.jit
def _shares(
    queries, keys, values, d_out, norm, delta, q_first, row, column, k_length, seed, head, heads, scale, drop,
    reach, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """(attention weights after dropout, gradient of the scores), both (queries, keys)."""
    scores = tl.dot(queries, tl.trans(keys)) * scale
    share = tl.where(sees(row, column, k_length, reach, NEAR), tl.exp(scores - norm[:, None]), 0.0)
    d_share = tl.dot(d_out, tl.trans(values))
    used = share
    if DROP:
        kept = kept_pairs(seed, q_first, row, column, head, heads, drop)
        used = tl.where(kept, share * (1.0 / (1.0 - drop)), 0.0)
        d_share = tl.where(kept, d_share * (1.0 / (1.0 - drop)), 0.0)
    return used, share * (d_share - delta[:, None]) * scale


@triton.jit
def _key_gradients(
    d_out, q, k, v, out, lse, d_k, d_v, seed, q_first, q_length, k_first, k_length, block, scale, drop, q_stride, k_stride,
    heads, head, reach, D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Those of one tile of keys and values."""
    column = block * TILE + tl.arange(0, TILE)
    keys = load_rows(k, k_first, column, k_length, k_stride, head, D)
    values = load_rows(v, k_first, column, k_length, k_stride, head, D)
    d_keys = tl.zeros((TILE, D), tl.float32)
    d_values = tl.zeros((TILE, D), tl.float32)
    for start in range(_first_tile(block, reach, TILE, NEAR), _end(block, q_length, reach, TILE, NEAR), TILE):
        row = start + tl.arange(0, TILE)
        queries = load_rows(q, q_first, row, q_length, q_stride, head, D)
        given = load_rows(d_out, q_first, row, q_length, heads * D, head, D)
        result = load_rows(out, q_first, row, q_length, heads * D, head, D)
        delta = tl.sum(given.to(tl.float32) * result.to(tl.float32), 1)
        norm = tl.load(lse + (q_first + row) * heads + head, mask=row < q_length, other=0.0)
        used, d_scores = _shares(
            queries, keys, values, given, norm, delta, q_first, row, column, k_length, seed, head, heads, scale, drop, reach,
            DROP, NEAR,
        )  # fmt: skip
        d_values += tl.dot(tl.trans(used.to(given.dtype)), given)
        d_keys += tl.dot(tl.trans(d_scores.to(queries.dtype)), queries)
    store_rows(d_k, d_keys, k_first, column, k_length, k_stride, head, D)
    store_rows(d_v, d_values, k_first, column, k_length, k_stride, head, D)


@triton.jit
def _query_gradients(
    d_out, q, k, v, out, lse, d_q, seed, q_first, q_length, k_first, k_length, block, scale, drop, q_stride, k_stride,
    heads, head, reach, D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Those of one tile of queries."""
    row = block * TILE + tl.arange(0, TILE)
    queries = load_rows(q, q_first, row, q_length, q_stride, head, D)
    given = load_rows(d_out, q_first, row, q_length, heads * D, head, D)
    result = load_rows(out, q_first, row, q_length, heads * D, head, D)
    delta = tl.sum(given.to(tl.float32) * result.to(tl.float32), 1)
    norm = tl.load(lse + (q_first + row) * heads + head, mask=row < q_length, other=0.0)
    d_queries = tl.zeros((TILE, D), tl.float32)
    for start in range(_first_tile(block, reach, TILE, NEAR), _end(block, k_length, reach, TILE, NEAR), TILE):
        column = start + tl.arange(0, TILE)
        keys = load_rows(k, k_first, column, k_length, k_stride, head, D)
        values = load_rows(v, k_first, column, k_length, k_stride, head, D)
        _, d_scores = _shares(
            queries, keys, values, given, norm, delta, q_first, row, column, k_length, seed, head, heads, scale, drop, reach,
            DROP, NEAR,
        )  # fmt: skip
        d_queries += tl.dot(d_scores.to(keys.dtype), keys)
    store_rows(d_q, d_queries, q_first, row, q_length, q_stride, head, D)


@triton.jit(do_not_specialize=["call", "blocks"])
def _backward(
    d_out, q, k, v, out, lse, d_q, d_k, d_v, seeds, q_bounds, k_bounds, call, scale, drop, q_stride, k_stride, heads, blocks,
    reach, low, D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    # Keys and queries of a row go to two programs: with few rows there are some to spare.
    stretch, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
    if k_length <= low:
        return
    seed = tl.load(seeds + call)
    if part < blocks:
        if part * TILE < k_length:
            _key_gradients(
                d_out, q, k, v, out, lse, d_k, d_v, seed, q_first, q_length, k_first, k_length, part, scale, drop,
                q_stride, k_stride, heads, head, reach, D, TILE, DROP, NEAR,
            )  # fmt: skip
    elif (part - blocks) * TILE < q_length:
        _query_gradients(
            d_out, q, k, v, out, lse, d_q, seed, q_first, q_length, k_first, k_length, part - blocks, scale, drop,
            q_stride, k_stride, heads, head, reach, D, TILE, DROP, NEAR,
        )  # fmt: skip


def _has_many(k_bounds: torch.Tensor, heads: int, size: int) -> bool:
    """Whether a program for each row and head fills the GPU."""
    return (k_bounds.shape[0] - 1) * heads > _MANY and size <= 64


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_bounds: torch.Tensor, k_bounds: torch.Tensor, *,
    q_longest: int, longest: int, scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output, log of the softmax's sum) for (tokens, heads, size) with any stride between tokens; k's is v's.

    With `window` a token sees those at most so far from it.
    """
    tokens, heads, size = q.shape
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, device=q.device)
    many = _has_many(k_bounds, heads, size)
    if many:
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call, "window": window}
        short_forward(q, k, v, out, q_bounds, k_bounds, longest=longest, **options)
        if longest <= LONGEST:
            return out, lse
    grid = (q_bounds.shape[0] - 1, heads, int(triton.cdiv(q_longest, _TILE)))
    _forward[grid](
        q, k, v, out, lse, seeds, q_bounds, k_bounds, call, scale, drop, q.stride(0), k.stride(0), heads,
        window or 0, LONGEST if many else 0, D=size, TILE=_TILE, DROP=drop > 0, NEAR=window is not None, num_warps=4,
    )  # fmt: skip
    return out, lse


def attention_backward(
    d_out: torch.Tensor, q: Any, k: Any, v: Any, out: torch.Tensor, lse: torch.Tensor, into: tuple[Any, ...],
    q_bounds: torch.Tensor, k_bounds: torch.Tensor, *,
    longest: int, scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v into `into`, whose strides are theirs."""
    heads, size = q.shape[1:]
    many = _has_many(k_bounds, heads, size)
    if many:
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call, "window": window}
        short_backward(d_out, q, k, v, into, q_bounds, k_bounds, longest=longest, **options)
        if longest <= LONGEST:
            return
    blocks = int(triton.cdiv(longest, _TILE))
    _backward[(k_bounds.shape[0] - 1, heads, 2 * blocks)](
        d_out, q, k, v, out, lse, *into, seeds, q_bounds, k_bounds, call, scale, drop, q.stride(0), k.stride(0), heads,
        blocks, window or 0, LONGEST if many else 0, D=size, TILE=_TILE, DROP=drop > 0, NEAR=window is not None,
        num_warps=4,
    )  # fmt: skip
