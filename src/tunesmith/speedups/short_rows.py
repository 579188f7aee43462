"""Attention of packed stretches that fit into one tile, a program for each stretch and head (triton).

All keys of a query are there at once: no running softmax, nothing kept for the backward pass, whose five products share the
scores. Stretches of at most 64 tokens and of at most 128 are two launches, each of which passes over the other's. Softmax is
in float32, products in the type given; what is dropped is drawn again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.speedups.triton_kernels import is_kept

LONGEST = 128
_FORWARD = ((0, 64, 64, 4, None), (64, 128, 32, 4, None))
_BACKWARD = ((0, 64, 64, 4, 128), (64, 128, 128, 8, None))
"""Of each launch: stretches longer than this, of at most so many keys; queries at a time; warps; registers at most."""
_FIRSTS = (16, 4, None)
"""The last three for one query a stretch."""


@triton.jit
def load_rows(base, first, row, length, stride, head, D: tl.constexpr):
    """Values (rows, D) of one head; zeros behind the stretch."""
    at = (first + row)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(base + at, mask=(row < length)[:, None], other=0.0)


@triton.jit
def store_rows(base, value, first, row, length, stride, head, D: tl.constexpr):
    """What lies inside the stretch."""
    at = (first + row)[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    tl.store(base + at, value, mask=(row < length)[:, None])


@triton.jit
def kept_pairs(seed, first, row, column, head, heads, drop):
    """bool (queries, keys): whether the weight is kept."""
    place = ((first + row) * heads + head)[:, None] * 4096 + column[None, :]
    return is_kept(seed, place, drop)


@triton.jit
def sees(row, column, k_length, reach, NEAR: tl.constexpr):
    """bool (queries, keys): whether a query sees a key: one of its row, with NEAR at most `reach` places away."""
    seen = (column < k_length)[None, :]
    if NEAR:
        apart = row[:, None] - column[None, :]
        seen = seen & (apart <= reach) & (apart >= -reach)
    return seen


@triton.jit
def _weights(queries, keys, row, column, k_length, scale, reach, NEAR: tl.constexpr):
    """(exponentials of the scores, their sum for each query)."""
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
    """Writes the output of stretches of at most `LONGEST` keys."""
    _launch(_short_forward, _FORWARD, (q, k, v, out, q, k), bounds, **options)  # type: ignore[arg-type]


def short_backward(
    d_out: torch.Tensor, q: Any, k: Any, v: Any, into: tuple[Any, ...], *bounds: torch.Tensor, **options: Any
) -> None:
    """Writes the gradients of their q, k and v into `into`."""
    _launch(_short_backward, _BACKWARD, (d_out, q, k, v, *into, q, k), bounds, **options)  # type: ignore[arg-type]
