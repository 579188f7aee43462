"""Fused GPU kernels: bias + dropout + residual + LayerNorm, and bias + GELU, forward and backward. Home of `triton`.

Each reads its inputs once and writes its outputs once. All arithmetic is in float32, whatever the tensors are stored in.
Nothing here decides anything: `fused_ops` does, and has the same maths in plain torch for where triton is missing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS, _MORE_PROGRAMS = 264, 528
"""Programs of a backward pass that keep sums over rows, few and many: two or four for each multiprocessor of an H200."""
_GELU_ROWS, _GELU_COLUMNS = 32, 128


@triton.jit
def is_kept(seed, at, drop):
    """Whether the value at this place is kept: 24 bits of two rounds of a 32-bit mixer over (seed, place).

    Far fewer instructions than triton's own philox; tests/kernels looks at what it draws.
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
    centred = tl.where(inside, x - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    centred *= scale
    y = centred * tl.load(gamma + column, mask=inside, other=0.0) + tl.load(beta + column, mask=inside, other=0.0)
    tl.store(out + at, y, mask=inside)
    if COPY:
        tl.store(copy + at, y, mask=inside)
    if KEEP:
        tl.store(unit + at, centred, mask=inside)
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
    """(the normal distribution up to `value`, exp(-value * value / 2)) in half the instructions of `erf`.

    0.5 erfc(a / sqrt 2) is the exponential times a polynomial of t = 1 / (1 + 0.27 a), fitted to 1.2e-6 of its value: GELU is
    within 2.8e-7 of the exact one for every value from -9 to 9, where float32's own formula with `erf` is within 4.5e-7.
    """
    a = tl.abs(value)
    e = tl.exp2(a * a * -0.7213475204444817)
    t = tl.rsqrt(1.0 + 0.27 * a)
    t *= t
    p = 0.1581799950185999 - 0.06074633766927499 * t
    p = p * t - 0.023771977253886377
    p = p * t + 0.11729094861412868
    p = p * t + 0.09292753121578769
    p = p * t + 0.10843166437131799
    p = p * t + 0.10768759295273511
    p = p * t * e
    return tl.where(value < 0.0, p, 1.0 - p), e


@triton.jit
def _load_tile(x, bias, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(x + bias of this program's tile, where it lies, what of it is inside, its columns)."""
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
    """(LayerNorm(residual + dropout(h + bias)) as `residual` is stored, the same in `dtype`, the same before gamma and beta
    as `h` is stored, 1 / deviation). The last two are for the backward pass, and written with `keep` only."""
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
    """How many programs share the rows of a backward pass that keeps sums over them."""
    return min(_PROGRAMS if rows < 2048 else _MORE_PROGRAMS, rows)


def add_norm_backward(
    d_out: torch.Tensor, d_copy: torch.Tensor | None, unit: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor,
    *, drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(gradient of h, of the residual, float32 (parts, 3, width): of gamma, beta, bias, to be summed over the parts)."""
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
    """GELU(x + bias), the exact one."""
    out = torch.empty_like(x)
    _bias_gelu_forward[_gelu_grid(x)](x, bias, out, *x.shape, ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS)
    return out


def bias_gelu_backward(d_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Any, Any]:
    """(GELU(x + bias) once more, gradient of x over that of the output, float32 (parts, width): of bias, to be summed)."""
    grid = _gelu_grid(x)
    out = torch.empty_like(x)
    sums = torch.empty(grid[1], x.shape[1], device=x.device)
    _bias_gelu_backward[grid](d_out, x, bias, out, d_out, sums, *x.shape, ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS)
    return out, d_out, sums
