"""GPU kernels for attention whose scores depend on distances: rows laid side by side and back, and softmax with all it adds.

Tokens of a packed batch are (tokens, kinds, heads, size); side by side they are (kinds, heads, stretches, longest, size).
What belongs to distances is (heads, tokens, 2 longest - 1): for the token at place i of its stretch, the entry for the one at
place j stands at longest - 1 - i + j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.speedups.triton_kernels import is_kept

_TILE = 64
_VALUES = 2048
"""Scores that one program holds."""


@triton.jit
def _lay(packed, spread, bounds, longest, heads, size, TILE: tl.constexpr, SIZE: tl.constexpr, BACK: tl.constexpr):
    """One tile of one stretch, side by side with zeros behind it; or, with BACK, into the packed tokens."""
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
        # what no token of the stretch is as far away as
        tl.store(d_by_key + line[:, None] + j[None, :], 0.0, mask=row & (j[None, :] < (longest - 1 - i)[:, None]))
        tl.store(
            d_by_key + (line + 2 * longest - 1 - i)[:, None] + j[None, :], 0.0, mask=row & (j[None, :] < i[:, None])
        )


@triton.jit
def _skew(d_scores, d_by_query, bounds, tokens, stretches, longest, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of scores, where `by_query` has it: a line for each key."""
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
    _lay[(stretches, int(triton.cdiv(longest, _TILE)), kinds * heads)](
        packed, spread, bounds, longest, heads, size, TILE=_TILE, SIZE=triton.next_power_of_2(size), BACK=back
    )


def spread_stretches(packed: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """(kinds, heads, stretches, longest, size) from (tokens, kinds, heads, size), with zeros behind each stretch."""
    _, kinds, heads, size = packed.shape
    out = packed.new_empty(kinds, heads, bounds.shape[0] - 1, longest, size)
    _lay_over(packed, out, bounds, back=False)
    return out


def gather_stretches(side_by_side: torch.Tensor, bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """(tokens, kinds, heads, size) from (kinds, heads, stretches, longest, size)."""
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
    """(softmax of (scores + what belongs to distances) * scale + bias within each stretch, the same with dropout)."""
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
    """Gradients of the scores, of `by_key` and of `by_query`."""
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
