"""Attention over packed examples in Triton: one program per example, head and tile, and separate ones for distances.

Softmax is in float32, matmuls in the input type; dropout is drawn again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.speedups.kernels.layers import is_kept

_TILE = 64


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
def _first_tile(block, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Return the start of the first tile that attends to this one, or that this one attends to."""
    return tl.maximum(block * TILE - reach, 0) // TILE * TILE if NEAR else 0


@triton.jit
def _end(block, length, reach, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Return the end of the tiles that attend to this one, or that this one attends to."""
    return tl.minimum((block + 1) * TILE + reach, length) if NEAR else length


@triton.jit(do_not_specialize=["call"])
def _forward(
    q, k, v, out, lse, seeds, q_bounds, k_bounds, call, scale, drop, q_stride, k_stride, heads, reach,
    D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    stretch, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
    if block * TILE >= q_length:
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
    reach, D: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    # Keys and queries of a row go to two programs: with few rows there are some to spare.
    stretch, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first = tl.load(q_bounds + stretch)
    q_length = tl.load(q_bounds + stretch + 1) - q_first
    k_first = tl.load(k_bounds + stretch)
    k_length = tl.load(k_bounds + stretch + 1) - k_first
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
    grid = (q_bounds.shape[0] - 1, heads, int(triton.cdiv(q_longest, _TILE)))
    _forward[grid](
        q, k, v, out, lse, seeds, q_bounds, k_bounds, call, scale, drop, q.stride(0), k.stride(0), heads,
        window or 0, D=size, TILE=_TILE, DROP=drop > 0, NEAR=window is not None, num_warps=4,
    )  # fmt: skip
    return out, lse


def attention_backward(
    d_out: torch.Tensor, q: Any, k: Any, v: Any, out: torch.Tensor, lse: torch.Tensor, into: tuple[Any, ...],
    q_bounds: torch.Tensor, k_bounds: torch.Tensor, *,
    longest: int, scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v into `into`, which has their strides."""
    heads, size = q.shape[1:]
    blocks = int(triton.cdiv(longest, _TILE))
    _backward[(k_bounds.shape[0] - 1, heads, 2 * blocks)](
        d_out, q, k, v, out, lse, *into, seeds, q_bounds, k_bounds, call, scale, drop, q.stride(0), k.stride(0), heads,
        blocks, window or 0, D=size, TILE=_TILE, DROP=drop > 0, NEAR=window is not None, num_warps=4,
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
