"""Triton kernels of encoder layers: bias + dropout + residual + LayerNorm, bias + GELU, GeGLU and rotation, forward and backward.

Each reads its inputs once and writes its outputs once. All arithmetic is in float32, whatever the storage type. `fused_ops`
decides when they are used, and has the same math in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS, _MORE_PROGRAMS = 264, 528
"""Programs of a backward pass that sums over rows, few and many: two or four per multiprocessor of an H200."""
_GELU_ROWS, _GELU_COLUMNS = 32, 128


@triton.jit
def is_kept(seed, at, drop):
    """Return whether dropout keeps the value at this position: 24 bits of two rounds of a 32-bit mixer over (seed, position).

    It needs far fewer instructions than Triton's philox; tests/kernels checks its statistics.
    """
    x = at.to(tl.uint32) ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = (x ^ (x >> 15)) + (seed >> 32).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    return x >= (tl.ceil(drop * 16777216.0).to(tl.uint32) << 8)


@triton.jit(do_not_specialize=["call"])
def _add_norm_forward(
    h, bias, residual, gamma, beta, seeds, out, copy, unit, rstd, call, width, eps, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, COPY: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0)
    if DROP:
        kept = is_kept(tl.load(seeds + call), at, drop)
        x = tl.where(kept, x * (1.0 / (1.0 - drop)), 0.0)
    x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(tl.where(inside, x, 0.0), 0) / width
    centered = tl.where(inside, x - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / width + eps)
    centered *= scale
    y = centered * tl.load(gamma + column, mask=inside, other=0.0) + tl.load(beta + column, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)
    if COPY:
        tl.store(copy + at, y, mask=inside)
    if KEEP:
        tl.store(unit + at, centered, mask=inside)
        tl.store(rstd + row, scale)


@triton.jit(do_not_specialize=["call", "rows"])
def _add_norm_backward(
    d_out, d_copy, unit, gamma, seeds, rstd, d_h, d_residual, sums, call, rows, width, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(gamma + column, mask=inside, other=0.0)
    seed = tl.load(seeds + call) if DROP else 0
    d_gamma = tl.zeros((BLOCK,), tl.float32)
    d_beta = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=3):  # the next rows are read meanwhile
        at = row * width + column
        x = tl.load(unit + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        if COPY:
            d_y += tl.load(d_copy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        d_gamma += d_y * x
        d_beta += d_y
        d_unit = d_y * weight
        d_x = (d_unit - x * (tl.sum(x * d_unit, 0) / width) - tl.sum(d_unit, 0) / width) * scale
        tl.store(d_residual + at, d_x, mask=inside)
        if DROP:
            d_x = tl.where(is_kept(seed, at, drop), d_x * (1.0 / (1.0 - drop)), 0.0)
        tl.store(d_h + at, d_x, mask=inside)
        d_bias += tl.where(inside, d_x, 0.0)
    place = first * 3 * width + column
    tl.store(sums + place, d_gamma, mask=inside)
    tl.store(sums + place + width, d_beta, mask=inside)
    tl.store(sums + place + 2 * width, d_bias, mask=inside)


@triton.jit
def normal_up_to(value):
    """Return (normal distribution function of `value`, exp(-value * value / 2))."""
    return 0.5 + 0.5 * tl.erf(value * 0.7071067811865476), tl.exp(value * value * -0.5)


@triton.jit
def _load_tile(x, bias, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (x + bias of this program's tile, its addresses, its mask, its columns)."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    shift = tl.load(bias + column, mask=column < width, other=0.0)
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :], at, inside, column


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu_forward(x, bias, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    value, at, inside, _ = _load_tile(x, bias, rows, width, ROWS, COLUMNS)
    share, _ = normal_up_to(value)
    tl.store(out + at, value * share, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu_backward(
    d_out, x, bias, out, d_x, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    value, at, inside, column = _load_tile(x, bias, rows, width, ROWS, COLUMNS)
    share, density = normal_up_to(value)
    slope = share + value * 0.3989422804014327 * density
    given = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    d_value = given * slope
    tl.store(out + at, value * share, mask=inside)
    tl.store(d_x + at, d_value, mask=inside)
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(d_value, 0), mask=column < width)


def add_norm_forward(
    h: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *,
    eps: float, drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (LayerNorm(residual + dropout(h + bias)) in the type of `residual`, the same in `dtype`, the same before gamma and
    beta in the type of `h`, 1 / deviation). The last two are for the backward pass and written only with `keep`.
    """
    rows, width = h.shape
    out = torch.empty_like(residual)
    copy = out if dtype == out.dtype else torch.empty_like(residual, dtype=dtype)
    unit, rstd = torch.empty_like(h) if keep else h, torch.empty(rows, device=h.device)
    _add_norm_forward[(rows,)](
        h, bias, residual, gamma, beta, seeds, out, copy, unit, rstd, call, width, eps, drop,
        BLOCK=triton.next_power_of_2(width), DROP=drop > 0, COPY=copy is not out, KEEP=keep, num_warps=4,
    )  # fmt: skip
    return out, copy, unit, rstd


def backward_programs(rows: int) -> int:
    """Return the number of programs that share the rows of a backward pass with sums over rows."""
    return min(_PROGRAMS if rows < 2048 else _MORE_PROGRAMS, rows)


def add_norm_backward(
    d_out: torch.Tensor, d_copy: torch.Tensor | None, unit: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor,
    *, drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (gradient of h, of the residual, float32 (parts, 3, width) to be summed: of gamma, beta and bias)."""
    rows, width = unit.shape
    programs = backward_programs(rows)
    sums = torch.empty(programs, 3, width, device=unit.device)
    d_h, d_residual = torch.empty_like(unit), torch.empty_like(d_out)
    _add_norm_backward[(programs,)](
        d_out, d_out if d_copy is None else d_copy, unit, gamma, seeds, rstd,
        d_h, d_residual, sums, call, rows, width, drop,
        BLOCK=triton.next_power_of_2(width), DROP=drop > 0, COPY=d_copy is not None, num_warps=4,
    )  # fmt: skip
    return d_h, d_residual, sums


def _gelu_grid(x: torch.Tensor) -> tuple[int, int]:
    return int(triton.cdiv(x.shape[1], _GELU_COLUMNS)), int(triton.cdiv(x.shape[0], _GELU_ROWS))


def bias_gelu_forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the exact GELU(x + bias)."""
    out = torch.empty_like(x)
    _bias_gelu_forward[_gelu_grid(x)](x, bias, out, *x.shape, ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS)
    return out


def bias_gelu_backward(d_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Any, Any]:
    """Return (GELU(x + bias) again, gradient of x, float32 (parts, width) to be summed: gradient of bias)."""
    grid = _gelu_grid(x)
    out = torch.empty_like(x)
    sums = torch.empty(grid[1], x.shape[1], device=x.device)
    _bias_gelu_backward[grid](d_out, x, bias, out, d_out, sums, *x.shape, ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS)
    return out, d_out, sums


_ROWS, _COLUMNS = 16, 128


@triton.jit(do_not_specialize=["call"])
def _sum_norm_forward(
    h, residual, gamma, beta, seeds, total, out, unit, rstd, call, width, eps, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, TOTAL: tl.constexpr, BETA: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        x = tl.where(is_kept(tl.load(seeds + call), at, drop), x * (1.0 / (1.0 - drop)), 0.0)
    x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if TOTAL:
        tl.store(total + at, x, mask=inside)
    middle = tl.sum(tl.where(inside, x, 0.0), 0) / width
    centered = tl.where(inside, x - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / width + eps)
    centered *= scale
    y = centered * tl.load(gamma + column, mask=inside, other=0.0)
    if BETA:
        y += tl.load(beta + column, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)
    if KEEP:
        tl.store(unit + at, centered, mask=inside)
        tl.store(rstd + row, scale)


@triton.jit(do_not_specialize=["call", "rows"])
def _sum_norm_backward(
    d_total, d_out, unit, gamma, seeds, rstd, d_h, d_residual, sums, call, rows, width, drop,
    BLOCK: tl.constexpr, DROP: tl.constexpr, TOTAL: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(gamma + column, mask=inside, other=0.0)
    d_gamma = tl.zeros((BLOCK,), tl.float32)
    d_beta = tl.zeros((BLOCK,), tl.float32)
    seed = tl.load(seeds + call) if DROP else 0
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=3):  # the next rows are read meanwhile
        at = row * width + column
        x = tl.load(unit + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        d_gamma += d_y * x
        if BETA:
            d_beta += d_y
        d_unit = d_y * weight
        d_x = (d_unit - x * (tl.sum(x * d_unit, 0) / width) - tl.sum(d_unit, 0) / width) * tl.load(rstd + row)
        if TOTAL:
            d_x += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_residual + at, d_x, mask=inside)
        if DROP:
            d_x = tl.where(is_kept(seed, at, drop), d_x * (1.0 / (1.0 - drop)), 0.0)
        tl.store(d_h + at, d_x, mask=inside)
    place = first * (2 * width if BETA else width) + column
    tl.store(sums + place, d_gamma, mask=inside)
    if BETA:
        tl.store(sums + place + width, d_beta, mask=inside)


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the addresses of this program's tile among activations and among values (gates follow them), and its mask."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return row[:, None] * width + column[None, :], row[:, None] * 2 * width + column[None, :], inside


@triton.jit(do_not_specialize=["call", "rows"])
def _geglu_forward(
    x, seeds, out, call, rows, width, drop, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr
):  # fmt: skip
    at, place, inside = _tile(rows, width, ROWS, COLUMNS)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + place + width, mask=inside, other=0.0).to(tl.float32)
    share, _ = normal_up_to(value)
    y = value * share * gate
    if DROP:
        y = tl.where(is_kept(tl.load(seeds + call), at, drop), y * (1.0 / (1.0 - drop)), 0.0)
    tl.store(out + at, y, mask=inside)


@triton.jit(do_not_specialize=["call", "rows"])
def _geglu_backward(
    d_out, x, seeds, out, d_x, call, rows, width, drop, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr
):  # fmt: skip
    at, place, inside = _tile(rows, width, ROWS, COLUMNS)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + place + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    share, density = normal_up_to(value)
    slope = share + value * 0.3989422804014327 * density
    active = value * share
    y = active * gate
    if DROP:
        kept = is_kept(tl.load(seeds + call), at, drop)
        y = tl.where(kept, y * (1.0 / (1.0 - drop)), 0.0)
        given = tl.where(kept, given * (1.0 / (1.0 - drop)), 0.0)
    tl.store(out + at, y, mask=inside)
    tl.store(d_x + place, given * gate * slope, mask=inside)
    tl.store(d_x + place + width, given * active, mask=inside)


@triton.jit
def _rotate(
    packed, cos, sin, heads, size, HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)  # those of the queries, then those of the keys
    column = tl.arange(0, HALF)
    half = size // 2
    c = tl.load(cos + token * size + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * size + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    inside = (head < 2 * heads)[:, None] & (column < half)[None, :]
    at = packed + token * 3 * heads * size + head[:, None] * size + column[None, :]
    one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, one * c - other * s, mask=inside)
    tl.store(at + half, other * c + one * s, mask=inside)


def sum_norm_forward(
    h: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, *,
    eps: float, drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, with_total: bool = True, keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (residual + dropout(h) in the type of `residual`, its LayerNorm in `dtype`, the norm before gamma and beta in the
    type of `h`, 1 / deviation). The sum is written only with `with_total`; the last two, for the backward pass, only with `keep`.
    """
    rows, width = h.shape
    total = torch.empty_like(residual) if with_total else residual
    out = torch.empty_like(residual, dtype=dtype)
    unit, rstd = torch.empty_like(h) if keep else h, torch.empty(rows, device=h.device)
    _sum_norm_forward[(rows,)](
        h, residual, gamma, gamma if beta is None else beta, seeds, total, out, unit, rstd, call, width, eps, drop,
        BLOCK=triton.next_power_of_2(width), DROP=drop > 0, TOTAL=with_total, BETA=beta is not None, KEEP=keep, num_warps=4,
    )  # fmt: skip
    return total, out, unit, rstd


def sum_norm_backward(
    d_total: torch.Tensor | None, d_out: torch.Tensor, unit: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, *,
    drop: float, seeds: torch.Tensor, call: int, stored: torch.dtype, with_beta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (gradient of h, of the residual in `stored`, float32 (parts, 1 or 2, width) to be summed: of gamma and beta)."""
    rows, width = unit.shape
    programs = backward_programs(rows)
    sums = torch.empty(programs, 2 if with_beta else 1, width, device=unit.device)
    d_h, d_residual = torch.empty_like(unit), torch.empty_like(unit, dtype=stored)
    _sum_norm_backward[(programs,)](
        d_out if d_total is None else d_total, d_out, unit, gamma, seeds, rstd,
        d_h, d_residual, sums, call, rows, width, drop,
        BLOCK=triton.next_power_of_2(width), DROP=drop > 0, TOTAL=d_total is not None, BETA=with_beta, num_warps=4,
    )  # fmt: skip
    return d_h, d_residual, sums


def _grid(rows: int, width: int) -> tuple[int, int]:
    return int(triton.cdiv(rows, _ROWS)), int(triton.cdiv(width, _COLUMNS))


def geglu_forward(x: torch.Tensor, *, drop: float, seeds: torch.Tensor, call: int) -> torch.Tensor:
    """Return dropout(GELU(values) * gates) of (rows, 2 width): values, then gates."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _geglu_forward[_grid(rows, width)](
        x, seeds, out, call, rows, width, drop, ROWS=_ROWS, COLUMNS=_COLUMNS, DROP=drop > 0
    )
    return out


def geglu_backward(
    d_out: torch.Tensor, x: torch.Tensor, *, drop: float, seeds: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the activation again, gradient of x)."""
    out, d_x = torch.empty_like(d_out), torch.empty_like(x)
    rows, width = out.shape
    _geglu_backward[_grid(rows, width)](
        d_out, x, seeds, out, d_x, call, rows, width, drop, ROWS=_ROWS, COLUMNS=_COLUMNS, DROP=drop > 0
    )
    return out, d_x


def rotate_in_place(packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, *, back: bool) -> None:
    """Rotate queries and keys of (tokens, 3 heads size) in place by the angles (tokens, size); with `back`, reversed."""
    size = cos.shape[1]
    _rotate[(packed.shape[0],)](
        packed, cos, sin, heads, size,
        HEADS=triton.next_power_of_2(2 * heads), HALF=triton.next_power_of_2(size // 2), BACK=back, num_warps=4,
    )  # fmt: skip
