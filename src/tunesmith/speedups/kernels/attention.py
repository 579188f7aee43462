"""Attention over packed examples in Triton.

Examples of up to 128 tokens fit into one tile, with one program per example and head: no running softmax, nothing stored for
the backward pass, whose five matmuls share the scores. Examples of at most 64 and of at most 128 tokens are two launches, each
of which skips the other's. Softmax is in float32, matmuls in the input type; dropout is drawn again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.speedups.kernels.layers import is_kept

LONGEST = 128
_FORWARD = ((0, 64, 64, 4, None), (64, 128, 32, 4, None))
_BACKWARD = ((0, 64, 64, 4, 128), (64, 128, 128, 8, None))
"""Per launch: examples longer than this; of at most this many keys; queries per tile; warps; maximum number of registers."""
_FIRSTS = (16, 4, None)
"""The last three values for one query per example."""


@triton.jit
def load_rows(base, first, row, length, stride, head, D: tl.constexpr):
    """Load values (rows, D) of one head, with zeros after the end of the example."""
    at = (first + row)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(base + at, mask=(row < length)[:, None], other=0.0)


@triton.jit
def store_rows(base, value, first, row, length, stride, head, D: tl.constexpr):
    """Store the rows inside the example."""
    at = (first + row)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    tl.store(base + at, value, mask=(row < length)[:, None])


@triton.jit
def kept_pairs(seed, first, row, column, head, heads, drop):
    """Return whether each attention weight is kept by dropout, bool (queries, keys)."""
    place = ((first + row) * heads + head)[:, None] * 4096 + column[None, :]
    return is_kept(seed, place, drop)


@triton.jit
def sees(row, column, k_length, reach, NEAR: tl.constexpr):
    """Return whether a query attends to a key, bool (queries, keys): same example; with NEAR at most `reach` positions away."""
    seen = (column < k_length)[None, :]
    if NEAR:
        apart = row[:, None] - column[None, :]
        seen = seen & (apart <= reach) & (apart >= -reach)
    return seen


@triton.jit
def _weights(queries, keys, row, column, k_length, scale, reach, NEAR: tl.constexpr):
    """Return (exponentials of the scores, their sum for each query)."""
    scores = tl.dot(queries, tl.trans(keys)) * (scale * 1.4426950408889634)
    scores = tl.where(sees(row, column, k_length, reach, NEAR), scores, -1e30)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit(do_not_specialize=["call"])
def _short_forward(
    q, k, v, out, seeds, q_bounds, k_bounds, call, scale, drop, q_stride, k_stride, heads, reach,
    D: tl.constexpr, LOW: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    head, stretch = tl.program_id(0), tl.program_id(1)
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
    if (k_length <= LOW) | (k_length > KEYS):
        return
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    seed = tl.load(seeds + call)
    column = tl.arange(0, KEYS)
    keys = load_rows(k, k_first, column, k_length, k_stride, head, D)
    values = load_rows(v, k_first, column, k_length, k_stride, head, D)
    for start in tl.range(0, QUERIES if QUERIES >= KEYS else q_length, QUERIES, num_stages=1):
        row = start + tl.arange(0, QUERIES)
        queries = load_rows(q, q_first, row, q_length, q_stride, head, D)
        weights, total = _weights(queries, keys, row, column, k_length, scale, reach, NEAR)
        if DROP:
            weights = tl.where(kept_pairs(seed, q_first, row, column, head, heads, drop), weights, 0.0)
            total *= 1.0 - drop
        result = tl.dot(weights.to(values.dtype), values) * (1.0 / total)[:, None]
        store_rows(out, result, q_first, row, q_length, heads * D, head, D)


@triton.jit(do_not_specialize=["call"])
def _short_backward(
    d_out, q, k, v, d_q, d_k, d_v, seeds, q_bounds, k_bounds, call, scale, drop, q_stride, k_stride, heads, reach,
    D: tl.constexpr, LOW: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    head, stretch = tl.program_id(0), tl.program_id(1)
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
    if (k_length <= LOW) | (k_length > KEYS):
        return
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    seed = tl.load(seeds + call)
    more = 1.0 / (1.0 - drop)
    column = tl.arange(0, KEYS)
    keys = load_rows(k, k_first, column, k_length, k_stride, head, D)
    values = load_rows(v, k_first, column, k_length, k_stride, head, D)
    d_keys = tl.zeros((KEYS, D), tl.float32)
    d_values = tl.zeros((KEYS, D), tl.float32)
    for start in tl.range(0, QUERIES if QUERIES >= KEYS else q_length, QUERIES, num_stages=1):
        row = start + tl.arange(0, QUERIES)
        queries = load_rows(q, q_first, row, q_length, q_stride, head, D)
        given = load_rows(d_out, q_first, row, q_length, heads * D, head, D)
        weights, total = _weights(queries, keys, row, column, k_length, scale, reach, NEAR)
        weights *= (1.0 / total)[:, None]
        d_weights = tl.dot(given, tl.trans(values))
        used = weights
        if DROP:
            kept = kept_pairs(seed, q_first, row, column, head, heads, drop)
            used = tl.where(kept, weights * more, 0.0)
            d_weights = tl.where(kept, d_weights * more, 0.0)
        d_values = tl.dot(tl.trans(used.to(given.dtype)), given, d_values)
        d_scores = weights * (d_weights - tl.sum(weights * d_weights, 1)[:, None]) * scale
        d_keys = tl.dot(tl.trans(d_scores.to(queries.dtype)), queries, d_keys)
        store_rows(d_q, tl.dot(d_scores.to(keys.dtype), keys), q_first, row, q_length, q_stride, head, D)
    store_rows(d_k, d_keys, k_first, column, k_length, k_stride, head, D)
    store_rows(d_v, d_values, k_first, column, k_length, k_stride, head, D)


def _launch(
    kernel: Any, launches: tuple[tuple[int, ...], ...], tensors: tuple[Any, ...], bounds: tuple[Any, Any],
    longest: int, scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None,
) -> None:  # fmt: skip
    q, k = tensors[-2:]
    stretches, (heads, size) = bounds[1].shape[0] - 1, q.shape[1:]
    for low, keys, *rest in launches:
        queries, warps, registers = _FIRSTS if q.shape[0] == stretches else rest
        limit = {"maxnreg": registers} if registers and not torch.version.hip else {}  # AMD's compiler has none
        if low < longest:
            kernel[(heads, stretches)](
                *tensors[:-2], seeds, *bounds, call, scale, drop, q.stride(0), k.stride(0), heads, window or 0,
                D=size, LOW=low, KEYS=keys, QUERIES=queries, DROP=drop > 0, NEAR=window is not None, num_warps=warps,
                **limit,
            )  # fmt: skip


def short_forward(q: Any, k: Any, v: Any, out: torch.Tensor, *bounds: torch.Tensor, **options: Any) -> None:
    """Write the output for examples of at most `LONGEST` keys."""
    _launch(_short_forward, _FORWARD, (q, k, v, out, q, k), bounds, **options)  # type: ignore[arg-type]


def short_backward(
    d_out: torch.Tensor, q: Any, k: Any, v: Any, into: tuple[Any, ...], *bounds: torch.Tensor, **options: Any
) -> None:
    """Write the gradients of q, k and v for them into `into`."""
    _launch(_short_backward, _BACKWARD, (d_out, q, k, v, *into, q, k), bounds, **options)  # type: ignore[arg-type]


_TILE = 64
_MANY = 400
"""Number of (example, head) pairs that fill the multiprocessors of a GPU three times."""


@triton.jit
def _first_tile(block, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Return the start of the first tile that attends to this one, or that this one attends to."""
    return tl.maximum(block * TILE - reach, 0) // TILE * TILE if NEAR else 0


@triton.jit
def _end(block, length, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Return the end of the tiles that attend to this one, or that this one attends to."""
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
        # Masked keys get a finite score. If the first tiles are masked, a later key outweighs them.
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
    """Return (attention weights after dropout, gradient of the scores), both (queries, keys)."""
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
    """Compute the gradients of one tile of keys and values."""
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
    """Compute the gradients of one tile of queries."""
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
    """Return whether one program per example and head fills the GPU."""
    return (k_bounds.shape[0] - 1) * heads > _MANY and size <= 64


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_bounds: torch.Tensor, k_bounds: torch.Tensor, *,
    q_longest: int, longest: int, scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (output, log of the softmax sum) for (tokens, heads, size). Tokens may have any stride; k and v have the same.

    With `window`, a token attends to tokens at most this far away.
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
    """Write the gradients of q, k and v into `into`, which has their strides."""
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


_ROW_TILE = 64
_VALUES = 2048
"""Number of scores that one program keeps."""


@triton.jit
def _lay(packed, spread, bounds, longest, heads, size, TILE: tl.constexpr, SIZE: tl.constexpr, BACK: tl.constexpr):
    """Copy one tile of one example to its padded place, with zeros after the end; with BACK, back to the packed tokens."""
    stretch, tile, both = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kinds_heads = tl.num_programs(2)
    start = tl.load(bounds + stretch).to(tl.int64)
    count = tl.load(bounds + stretch + 1) - start
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, SIZE)
    inside = (row < count)[:, None] & (column < size)[None, :]
    token = packed + ((start + row) * kinds_heads + both)[:, None] * size + column[None, :]
    line = (both.to(tl.int64) * tl.num_programs(0) + stretch) * longest
    place = spread + (line + row)[:, None] * size + column[None, :]
    if BACK:
        tl.store(token, tl.load(place, mask=inside, other=0.0), mask=inside)
    else:
        there = (row < longest)[:, None] & (column < size)[None, :]
        tl.store(place, tl.load(token, mask=inside, other=0.0), mask=there)


@triton.jit(do_not_specialize=["call"])
def _weigh_forward(
    scores, by_key, by_query, bias, bounds, seeds, plain, weights, call, tokens, stretches, longest, scale, drop,
    TILE: tl.constexpr, WIDTH: tl.constexpr, KEY: tl.constexpr, QUERY: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    pair, tile = tl.program_id(0), tl.program_id(1)
    head, stretch = pair // stretches, pair % stretches
    start = tl.load(bounds + stretch).to(tl.int64)
    count = tl.load(bounds + stretch + 1) - start
    i = tile * TILE + tl.arange(0, TILE)
    j = tl.arange(0, WIDTH)
    inside = (i < longest)[:, None] & (j < longest)[None, :]
    real = (i < count)[:, None] & (j < count)[None, :]
    at = pair.to(tl.int64) * longest * longest + (i * longest)[:, None] + j[None, :]
    x = tl.load(scores + at, mask=real, other=0.0).to(tl.float32)
    far = 2 * longest - 1
    first = head.to(tl.int64) * tokens + start
    if KEY:
        place = ((first + i) * far + longest - 1 - i)[:, None] + j[None, :]
        x += tl.load(by_key + place, mask=real, other=0.0).to(tl.float32)
    if QUERY:
        place = ((first + j) * far + longest - 1 - j)[None, :] + i[:, None]
        x += tl.load(by_query + place, mask=real, other=0.0).to(tl.float32)
    x *= scale
    if BIAS:
        x += tl.load(bias + (head * longest + i)[:, None] * longest + j[None, :], mask=real, other=0.0)
    x = tl.where((j < count)[None, :], x, float("-inf"))
    x = tl.exp(x - tl.max(x, 1)[:, None])
    x = tl.where(real, x / tl.sum(x, 1)[:, None], 0.0)
    tl.store(plain + at, x, mask=inside)
    if DROP:
        kept = is_kept(tl.load(seeds + call), at, drop)
        tl.store(weights + at, tl.where(kept, x * (1.0 / (1.0 - drop)), 0.0), mask=inside)


@triton.jit(do_not_specialize=["call"])
def _weigh_backward(
    d_weights, plain, bounds, seeds, d_scores, d_by_key, call, tokens, stretches, longest, scale, drop,
    TILE: tl.constexpr, WIDTH: tl.constexpr, KEY: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    pair, tile = tl.program_id(0), tl.program_id(1)
    head, stretch = pair // stretches, pair % stretches
    start = tl.load(bounds + stretch).to(tl.int64)
    count = tl.load(bounds + stretch + 1) - start
    i = tile * TILE + tl.arange(0, TILE)
    j = tl.arange(0, WIDTH)
    inside = (i < longest)[:, None] & (j < longest)[None, :]
    real = (i < count)[:, None] & (j < count)[None, :]
    at = pair.to(tl.int64) * longest * longest + (i * longest)[:, None] + j[None, :]
    d = tl.load(d_weights + at, mask=real, other=0.0).to(tl.float32)
    if DROP:
        d = tl.where(is_kept(tl.load(seeds + call), at, drop), d * (1.0 / (1.0 - drop)), 0.0)
    p = tl.load(plain + at, mask=real, other=0.0).to(tl.float32)
    d = p * (d - tl.sum(p * d, 1)[:, None]) * scale
    tl.store(d_scores + at, d, mask=inside)
    if KEY:
        line = (head.to(tl.int64) * tokens + start + i) * (2 * longest - 1)
        row = (i < count)[:, None]
        tl.store(d_by_key + (line + longest - 1 - i)[:, None] + j[None, :], d, mask=row & (j < longest)[None, :])
        # Distances that no pair of tokens in the stretch has.
        tl.store(d_by_key + line[:, None] + j[None, :], 0.0, mask=row & (j[None, :] < (longest - 1 - i)[:, None]))
        tl.store(
            d_by_key + (line + 2 * longest - 1 - i)[:, None] + j[None, :], 0.0, mask=row & (j[None, :] < i[:, None])
        )


@triton.jit
def _skew(d_scores, d_by_query, bounds, tokens, stretches, longest, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Write the gradient of scores to the layout of `by_query`, one row per key."""
    pair, tile = tl.program_id(0), tl.program_id(1)
    head, stretch = pair // stretches, pair % stretches
    start = tl.load(bounds + stretch).to(tl.int64)
    count = tl.load(bounds + stretch + 1) - start
    j = tile * TILE + tl.arange(0, TILE)
    i = tl.arange(0, WIDTH)
    row = (j < count)[:, None]
    at = pair.to(tl.int64) * longest * longest + j[:, None] + (i * longest)[None, :]
    d = tl.load(d_scores + at, mask=row & (i < count)[None, :], other=0.0)
    line = (head.to(tl.int64) * tokens + start + j) * (2 * longest - 1)
    tl.store(d_by_query + (line + longest - 1 - j)[:, None] + i[None, :], d, mask=row & (i < longest)[None, :])
    tl.store(d_by_query + line[:, None] + i[None, :], 0.0, mask=row & (i[None, :] < (longest - 1 - j)[:, None]))
    tl.store(d_by_query + (line + 2 * longest - 1 - j)[:, None] + i[None, :], 0.0, mask=row & (i[None, :] < j[:, None]))


def _lay_over(packed: torch.Tensor, spread: torch.Tensor, bounds: torch.Tensor, *, back: bool) -> None:
    kinds, heads, stretches, longest, size = spread.shape
    _lay[(stretches, int(triton.cdiv(longest, _ROW_TILE)), kinds * heads)](
        packed,
        spread,
        bounds,
        longest,
        heads,
        size,
        TILE=_ROW_TILE,
        SIZE=triton.next_power_of_2(size),
        BACK=back,
    )


def spread_stretches(packed: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """Return padded examples (kinds, heads, examples, longest, size) of packed ones (tokens, kinds, heads, size)."""
    _, kinds, heads, size = packed.shape
    out = packed.new_empty(kinds, heads, bounds.shape[0] - 1, longest, size)
    _lay_over(packed, out, bounds, back=False)
    return out


def gather_stretches(side_by_side: torch.Tensor, bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return packed examples (tokens, kinds, heads, size) of padded ones (kinds, heads, examples, longest, size)."""
    kinds, heads, _, _, size = side_by_side.shape
    out = side_by_side.new_empty(tokens, kinds, heads, size)
    _lay_over(out, side_by_side, bounds, back=True)
    return out


def _tiles(longest: int) -> tuple[int, dict[str, int]]:
    width = triton.next_power_of_2(longest)
    tile = max(1, _VALUES // width)
    return int(triton.cdiv(longest, tile)), {"TILE": tile, "WIDTH": width}


def weigh_scores(
    scores: torch.Tensor, by_key: torch.Tensor | None, by_query: torch.Tensor | None, bias: torch.Tensor | None,
    bounds: torch.Tensor, *, scale: float, drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return softmax((scores + distance terms) * scale + bias) within each example, without and with dropout."""
    heads, stretches, longest, _ = scores.shape
    plain = torch.empty_like(scores)
    weights = torch.empty_like(scores) if drop > 0 else plain
    tokens = next((t.shape[1] for t in (by_key, by_query) if t is not None), 0)
    tiles, sizes = _tiles(longest)
    _weigh_forward[(heads * stretches, tiles)](
        scores, scores if by_key is None else by_key, scores if by_query is None else by_query,
        scores if bias is None else bias, bounds, seeds, plain, weights, call, tokens, stretches, longest, scale, drop,
        **sizes, KEY=by_key is not None, QUERY=by_query is not None, BIAS=bias is not None, DROP=drop > 0,
    )  # fmt: skip
    return plain, weights


def weigh_scores_backward(
    d_weights: torch.Tensor, plain: torch.Tensor, bounds: torch.Tensor, tokens: int, *,
    key: bool, query: bool, scale: float, drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of the scores, of `by_key` and of `by_query`."""
    heads, stretches, longest, _ = plain.shape
    d_scores = torch.empty_like(plain)
    d_by_key, d_by_query = (
        plain.new_empty(heads, tokens, 2 * longest - 1) if asked else None for asked in (key, query)
    )
    tiles, sizes = _tiles(longest)
    _weigh_backward[(heads * stretches, tiles)](
        d_weights, plain, bounds, seeds, d_scores, d_scores if d_by_key is None else d_by_key,
        call, tokens, stretches, longest, scale, drop, **sizes, KEY=key, DROP=drop > 0,
    )  # fmt: skip
    if d_by_query is not None:
        _skew[(heads * stretches, tiles)](d_scores, d_by_query, bounds, tokens, stretches, longest, **sizes)
    return d_scores, d_by_key, d_by_query
