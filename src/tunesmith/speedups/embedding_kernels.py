"""GPU kernels of the embedding block: tables, sum, LayerNorm and dropout in one pass, and the gradients of the tables (triton).

Gradients of words and positions are one sum: each token has a key for its word and one for its position, the keys are sorted
once, and what lies between two changes of the key is added up in that order. The sorted keys are cut into chunks, a program
each; what crosses a border is kept aside and added up by a second kernel. No atomics: a batch has one result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.speedups.triton_kernels import backward_programs, is_kept

_FORWARD_WARPS = 4
_BACKWARD_WARPS, _BACKWARD_STAGES = 4, 3
_SUMMED_AS = torch.float32
"""How the gradient of the sum of embeddings is stored, as it is for transformers' modules."""
_FEW_KEYS, _SHORT_CHUNK, _CHUNK = 8192, 8, 32
"""Sorted keys of one program: few where there are few, so that the GPU has enough programs."""
_COLUMNS, _SUM_WARPS, _SUM_STAGES = 256, 2, 3
_JOINED, _JOIN_WARPS = 16, 4
"""Chunks of one long stretch of a key that are added up at a time."""
_SHORT_KEYS = True
"""Keys of 16 bits where they fit: half the passes of a sort."""


@triton.jit(do_not_specialize=["call"])
def _embed_forward(
    ids, positions, types, rows_of, word, place, kind, gamma, beta, seeds, out, copy, unit, rstd, keys,
    call, known, words, places, word_padding, place_padding, width, eps, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, COPY: tl.constexpr, CUT: tl.constexpr, KINDS: tl.constexpr, TYPED: tl.constexpr,
):  # fmt: skip
    """One token. What lies outside a table is not a number, which ends the run as a loss."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids + token).to(tl.int32)
    if CUT:
        row = tl.load(rows_of + row, mask=(row >= 0) & (row < known), other=-1)
    position = tl.load(positions + token).to(tl.int32)
    there = (row >= 0) & (row < words) & (position >= 0) & (position < places)
    read = column < tl.where(there, width, 0)
    x = tl.load(word + row.to(tl.int64) * width + column, mask=read, other=float("nan"))
    if KINDS > 0:
        if TYPED:
            which = tl.load(types + token).to(tl.int32)
            named = tl.where((which >= 0) & (which < KINDS), width, 0)
            x += tl.load(kind + which * width + column, mask=column < named, other=float("nan"))
        else:
            x += tl.load(kind + column, mask=inside, other=0.0)
    x += tl.load(place + position * width + column, mask=read, other=float("nan"))
    middle = tl.sum(tl.where(inside, x, 0.0), 0) / width
    centred = tl.where(inside, x - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    centred *= scale
    y = centred * tl.load(gamma + column, mask=inside, other=0.0) + tl.load(beta + column, mask=inside, other=0.0)
    at = token * width + column
    if DROP:
        kept = is_kept(tl.load(seeds + call), at, drop)
        y = tl.where(kept, y * (1.0 / (1.0 - drop)), 0.0)
    tl.store(out + at, y, mask=inside)
    if COPY:
        tl.store(copy + at, y, mask=inside)
    tl.store(unit + at, centred, mask=inside)
    tl.store(rstd + token, scale)
    nothing = words + places  # behind all rows: tokens of padding leave no gradient
    tl.store(keys + token, tl.where(there & (row != word_padding), row, nothing))
    placed = there & (position != place_padding)
    tl.store(keys + tl.num_programs(0) + token, tl.where(placed, words + position, nothing))


@triton.jit(do_not_specialize=["call", "tokens"])
def _embed_backward(
    d_out, d_copy, unit, gamma, seeds, rstd, types, d_sum, sums, call, tokens, width, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, COPY: tl.constexpr, KINDS: tl.constexpr, TYPED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Towards the sum of embeddings; gamma, beta and the (at most two) kinds of tokens are summed on the way."""
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(gamma + column, mask=inside, other=0.0)
    seed = tl.load(seeds + call) if DROP else 0
    d_gamma = tl.zeros((BLOCK,), tl.float32)
    d_beta = tl.zeros((BLOCK,), tl.float32)
    d_one = tl.zeros((BLOCK,), tl.float32)
    d_other = tl.zeros((BLOCK,), tl.float32)
    for token in tl.range(first, tokens, tl.num_programs(0), num_stages=STAGES):
        at = token * width + column
        x = tl.load(unit + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        if COPY:
            d_y += tl.load(d_copy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + token)
        if DROP:
            d_y = tl.where(is_kept(seed, at, drop), d_y * (1.0 / (1.0 - drop)), 0.0)
        d_gamma += d_y * x
        d_beta += d_y
        d_unit = d_y * weight
        d_x = (d_unit - x * (tl.sum(x * d_unit, 0) / width) - tl.sum(d_unit, 0) / width) * scale
        tl.store(d_sum + at, d_x, mask=inside)
        if KINDS == 2 and TYPED:
            which = tl.load(types + token)
            d_one += tl.where(which == 0, d_x, 0.0)
            d_other += tl.where(which == 1, d_x, 0.0)
        elif KINDS > 0:
            d_one += d_x
    line = first * (2 + KINDS) * width + column
    tl.store(sums + line, d_gamma, mask=inside)
    tl.store(sums + line + width, d_beta, mask=inside)
    if KINDS > 0:
        tl.store(sums + line + 2 * width, d_one, mask=inside)
    if KINDS > 1:
        tl.store(sums + line + 3 * width, d_other, mask=inside)


@triton.jit(do_not_specialize=["count", "tokens"])
def _sum_stretches(
    given, keys, order, table, aside, count, tokens, width, rows,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of sorted keys. A stretch of one key that lies inside it is a row of the table; of one that came in from
    before, the part up to its end goes aside, and so does the part of one that continues behind the chunk."""
    chunk = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, count)
    start = tl.load(keys + first).to(tl.int32)
    if start >= rows:  # sorted: padding alone from here on
        return
    own = (start != tl.load(keys + first - 1, mask=first > 0, other=-1).to(tl.int32)).to(tl.int32)
    parts = aside + 2 * chunk * width + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for at in tl.range(first, end, num_stages=STAGES):
        key = tl.load(keys + at).to(tl.int32)
        following = tl.load(keys + at + 1, mask=at + 1 < count, other=-1).to(tl.int32)
        token = tl.load(order + at).to(tl.int32)
        token = tl.where(token < tokens, token, token - tokens)
        real = tl.where(key < rows, width, 0)  # values of a row that there are
        total += tl.load(given + token * width + column, mask=column < real, other=0.0).to(tl.float32)
        ends = (key != following).to(tl.int32)
        line = table + key.to(tl.int64) * width + column
        tl.store(line, total, mask=column < real * ends * own)
        tl.store(parts, total, mask=column < real * ends * (1 - own))
        total = tl.where(ends == 1, 0.0, total)
        own = own | ends
    goes_on = tl.load(keys + end, mask=end < count, other=-1) == tl.load(keys + end - 1)
    tl.store(parts + width, total, mask=column < tl.where(goes_on, width, 0))


@triton.jit(do_not_specialize=["chunks"])
def _join_stretches(
    keys, table, aside, chunks, width, rows, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr
):
    """The row of the key that begins in this chunk and continues behind it: what it left aside there and in those it reaches."""
    chunk = tl.program_id(1)
    first = chunk * CHUNK
    key = tl.load(keys + first + CHUNK - 1)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    if (key != tl.load(keys + first + CHUNK)) | (key == before) | (key >= rows):
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.load(aside + (2 * chunk + 1) * width + column, mask=inside, other=0.0)
    number = chunk + 1 + tl.arange(0, JOINED)
    goes_on = 1
    while goes_on == 1:
        reached = tl.load(keys + number * CHUNK, mask=number < chunks, other=-1) == key
        through = tl.load(keys + (number + 1) * CHUNK, mask=number + 1 < chunks, other=-1) == key
        line = (2 * number + through.to(tl.int32)) * width
        there = reached[:, None] & inside[None, :]
        total += tl.sum(tl.load(aside + line[:, None] + column[None, :], mask=there, other=0.0), 0)
        number += JOINED
        goes_on = tl.min(through.to(tl.int32), 0)
    tl.store(table + key.to(tl.int64) * width + column, total, mask=inside)


def embed_forward(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], rows_of: torch.Tensor | None,
    word: torch.Tensor, place: torch.Tensor, kind: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor, *,
    paddings: tuple[int, int], eps: float, drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, copied: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(dropout of the LayerNorm of the sum of embeddings, the same in `dtype` where it is `copied`, the norm before gamma and
    beta in `dtype`, 1 / deviation, keys of words and then of positions). `tokens`: ids, positions, kinds; `rows_of`: the row
    of an id; `paddings`: rows of words and positions that get no gradient."""
    ids, positions, types = tokens
    count, width = ids.shape[0], word.shape[1]
    rows = word.shape[0] + place.shape[0]
    out = torch.empty(count, width, device=ids.device)
    copy = torch.empty_like(out, dtype=dtype) if copied else out
    unit, rstd = torch.empty_like(out, dtype=dtype), torch.empty(count, device=ids.device)
    short = _SHORT_KEYS and rows < 2**15
    keys = torch.empty(2 * count, dtype=torch.int16 if short else torch.int32, device=ids.device)
    _embed_forward[(count,)](
        ids, positions, ids if types is None else types, ids if rows_of is None else rows_of, word, place,
        place if kind is None else kind, gamma, beta, seeds, out, copy, unit, rstd, keys,
        call, 0 if rows_of is None else rows_of.shape[0], word.shape[0], place.shape[0], *paddings, width, eps, drop,
        BLOCK=triton.next_power_of_2(width), DROP=drop > 0, COPY=copied, CUT=rows_of is not None,
        KINDS=0 if kind is None else kind.shape[0], TYPED=types is not None, num_warps=_FORWARD_WARPS,
    )  # fmt: skip
    return out, copy, unit, rstd, keys


def embed_backward(
    d_out: torch.Tensor, d_copy: torch.Tensor | None, unit: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor,
    types: torch.Tensor | None, kinds: int, *, drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(gradient of the sum of embeddings, float32 (parts, 2 + kinds, width): of gamma, beta and the kinds of tokens, to be
    summed over the parts)."""
    count, width = unit.shape
    programs = backward_programs(count)
    sums = torch.empty(programs, 2 + kinds, width, device=unit.device)
    d_sum = torch.empty_like(unit, dtype=_SUMMED_AS)
    _embed_backward[(programs,)](
        d_out, d_out if d_copy is None else d_copy, unit, gamma, seeds, rstd, rstd if types is None else types,
        d_sum, sums, call, count, width, drop, BLOCK=triton.next_power_of_2(width), DROP=drop > 0,
        COPY=d_copy is not None, KINDS=kinds, TYPED=types is not None, STAGES=_BACKWARD_STAGES,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return d_sum, sums


def sum_by_key(given: torch.Tensor, keys: torch.Tensor, rows: int) -> torch.Tensor:
    """float32 (rows, width): for each key below `rows`, the sum of `given` over the tokens that have it, in one order.

    `keys` has one or more keys for each token, those of all tokens one after the other.
    """
    tokens, width = given.shape
    assert keys.shape[0] in (tokens, 2 * tokens)
    ordered, order = torch.sort(keys, stable=True)
    chunk = _SHORT_CHUNK if keys.shape[0] <= _FEW_KEYS else _CHUNK
    chunks = int(triton.cdiv(keys.shape[0], chunk))
    table = torch.zeros(rows, width, device=given.device)
    aside = torch.empty(2 * chunks, width, device=given.device)
    blocks = int(triton.cdiv(width, _COLUMNS))
    sizes = {"CHUNK": chunk, "COLUMNS": _COLUMNS}
    _sum_stretches[(blocks, chunks)](
        given, ordered, order, table, aside, keys.shape[0], tokens, width, rows, **sizes, STAGES=_SUM_STAGES,
        num_warps=_SUM_WARPS,
    )  # fmt: skip
    if chunks > 1:
        _join_stretches[(blocks, chunks - 1)](
            ordered, table, aside, chunks, width, rows, **sizes, JOINED=_JOINED, num_warps=_JOIN_WARPS
        )
    return table
