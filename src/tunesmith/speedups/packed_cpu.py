"""Packed attention on the CPU.

Examples of similar length share batched matmuls, and forward and backward are one autograd node. Measured against SDPA for one
example after the other: 3.4 vs. 6.9 ms per layer for 8 examples of MRPC, 17 vs. 60 ms for 32 (MiniLM, one core).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.speedups.packing import Layout

CALLS = 8192
"""Attention scores that cost as much time as the calls for one more cluster."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Examples that share matmuls, each as long as the longest of them."""

    asked: slice
    """Place of the queries among those of all clusters."""
    known: slice
    """Place of the keys and values."""
    weights: slice
    queries: int
    keys: int
    mask: torch.Tensor | None
    """float32, added to scores (examples, heads, queries, keys): -inf for hidden keys. None: all keys are visible."""

    def scores(self, flat: torch.Tensor) -> torch.Tensor:
        """(examples x heads, queries, keys): this cluster's part of a flat tensor of scores."""
        return flat[self.weights].view(-1, self.queries, self.keys)

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """(examples x heads, queries, size)."""
        return x[self.asked].view(-1, self.queries, x.shape[-1])

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """(examples x heads, keys, size)."""
        return x[self.known].view(-1, self.keys, x.shape[-1])


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The order (cluster, example, head, token) of tokens and heads."""

    clusters: tuple[Cluster, ...]
    into: torch.Tensor
    """int64 (places): token x heads + head at each place. Behind the end of an example it is the example's last token."""
    back: torch.Tensor
    """int64 (tokens x heads): the place of each."""
    real: torch.Tensor | None
    """float32 (places, 1): 0 behind the end of an example, else 1. None if all are real."""

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """(places, size) from (tokens, heads, size)."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.into)

    def gather(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(tokens, heads, size) from (places, size); zero for tokens outside of all examples."""
        found, missing = x.index_select(0, self.back), shape[0] * shape[1] - self.back.shape[0]
        if missing:
            found = torch.cat([found, found.new_zeros(missing, shape[2])])
        return found.view(shape)


@lru_cache(maxsize=8)
def plan_rows(lengths: tuple[int, ...], heads: int, first_only: bool, window: int | None = None) -> RowPlan:
    """The plan for examples of these lengths. All layers of a batch share it."""
    starts, clusters = np.concatenate(([0], np.cumsum(lengths))), list[Cluster]()
    into, real = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    known = weights = 0
    for first, end in _cluster_bounds(lengths, heads, first_only):
        sizes, count = np.array(lengths[first:end])[:, None], end - first
        keys = int(sizes.max())
        place, queries = np.arange(keys), 1 if first_only else keys
        token, there = starts[first:end, None] + np.minimum(place, sizes - 1), place < sizes
        into.append((token[:, None] * heads + np.arange(heads)[:, None]).ravel())
        real.append(np.repeat(there[:, None], heads, axis=1).ravel())
        k_at = slice(known, known + count * heads * keys)
        q_at = slice(first * heads, end * heads) if first_only else k_at
        w_at = slice(weights, weights + count * heads * queries * keys)
        clusters.append(Cluster(q_at, k_at, w_at, queries, keys, _mask(there, queries, window)))
        known, weights = k_at.stop, w_at.stop
    source, is_real = np.concatenate(into), np.concatenate(real)
    back = np.empty(starts[-1] * heads, dtype=np.int64)
    back[source[is_real]] = np.flatnonzero(is_real)
    shorter = None if is_real.all() else torch.from_numpy(is_real.astype(np.float32)).unsqueeze(1)
    return RowPlan(tuple(clusters), torch.from_numpy(source), torch.from_numpy(back), shorter)


def _cluster_bounds(lengths: tuple[int, ...], heads: int, first_only: bool) -> list[tuple[int, int]]:
    """(first, end) of each cluster. A packed batch is sorted by length, so neighbors are similar."""
    found, longest = list[tuple[int, int]](), 0
    for number in reversed(range(len(lengths))):
        keys = lengths[number]
        spare = (longest - keys) * heads * (1 if first_only else longest + keys)
        if found and found[-1][0] == number + 1 and 0 < keys <= longest and spare < CALLS:
            found[-1] = (number, found[-1][1])
        elif keys:
            found.append((number, number + 1))
            longest = keys
    return found[::-1]


def _mask(there: NDArray[np.bool_], queries: int, window: int | None) -> torch.Tensor | None:
    inside = torch.from_numpy(there)
    hidden, far = ~inside[:, None, None], too_far(queries, there.shape[1], window)
    if far is not None:  # a place behind the end of an example, and outside the window, would see no key at all
        hidden = (hidden | far) & inside[:, None, :queries, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if bool(hidden.any()) else None


def too_far(queries: int, keys: int, window: int | None) -> torch.Tensor | None:
    """bool (queries, keys): further apart than `window`. None if nothing is."""
    if window is None or keys - 1 <= window:
        return None
    places = torch.arange(keys)
    return (places[:queries, None] - places).abs() > window


def attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(queries, heads, head size): softmax attention within each example.

    `bias` (heads, longest, longest) is added to the scores of each pair of positions.
    """
    if not torch.is_grad_enabled() and dropout == 0.0:
        return _attend_without_gradient(q, k, v, layout.lengths, first_only, scale, window, bias)
    out: torch.Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, bias, layout.lengths, first_only, scale, dropout, window
    )
    return out


LengthGroup = tuple[slice, slice, int, int, int]
"""Place of the queries and of the keys; number of examples; queries and keys of each."""


def length_groups(lengths: tuple[int, ...], first_only: bool) -> Iterator[LengthGroup]:
    """Runs of examples of equal length (a packed batch is sorted by length)."""
    q_at = k_at = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        queries = 1 if first_only else length
        q_end, k_end = q_at + count * queries, k_at + count * length
        if length:
            yield slice(q_at, q_end), slice(k_at, k_end), count, queries, length
        q_at, k_at = q_end, k_end


def _attend_without_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], first_only: bool, scale: float,
    window: int | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """For prediction: nothing is kept for a backward pass, so torch's kernel can process the scores in blocks.

    2.2x faster at 512 tokens, 1.4x at 128; below 40 the copies of `_PackedAttention` cost as much.
    """
    heads, size = q.shape[1:]
    out = q.new_empty(q.shape)
    for q_at, k_at, count, queries, keys in length_groups(lengths, first_only):
        asked = q[q_at].view(count, queries, heads, size).transpose(1, 2)
        known, given = (x[k_at].view(count, keys, heads, size).transpose(1, 2) for x in (k, v))
        far = too_far(queries, keys, window)
        near = None if far is None else ~far
        if bias is not None:
            near = bias[:, :queries, :keys]
        found = functional.scaled_dot_product_attention(asked, known, given, attn_mask=near, scale=scale)
        out[q_at].view(count, queries, heads, size).copy_(found.transpose(1, 2))
    return out


class _PackedAttention(torch.autograd.Function):
    """One node for all examples: autograd's bookkeeping per example would cost more than the matmuls."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, lengths: tuple[int, ...],
        first_only: bool, scale: float, dropout: float, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan_rows(lengths, q.shape[1], first_only, window)
        asked = q.reshape(-1, q.shape[2]) if first_only else plan.spread(q)
        known, given = plan.spread(k), plan.spread(v)
        weights = asked.new_empty(plan.clusters[-1].weights.stop)
        for one in plan.clusters:
            scores = one.scores(weights)
            keys = one.of_keys(known).transpose(1, 2)
            torch.baddbmm(scores, one.of_queries(asked), keys, beta=0, alpha=scale, out=scores)
            by_head = scores.view(-1, q.shape[1], one.queries, one.keys)
            if bias is not None:
                by_head.add_(bias[:, : one.queries, : one.keys])
            if one.mask is not None:
                by_head.add_(one.mask)
            torch.softmax(scores, -1, out=scores)
        keep = draw_keep_mask(weights, dropout) if dropout > 0 else None
        used = weights if keep is None else weights * keep
        out = torch.zeros_like(asked)
        for one in plan.clusters:
            torch.bmm(one.scores(used), one.of_keys(given), out=one.of_queries(out))
        ctx.save_for_backward(asked, known, given, weights, used, keep)
        ctx.plan, ctx.scale, ctx.first_only = plan, scale, first_only
        ctx.shapes = q.shape, k.shape, None if bias is None else bias.shape
        return out.view(q.shape) if first_only else plan.gather(out, q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        asked, known, given, weights, used, keep = ctx.saved_tensors
        plan, scale, (q_shape, k_shape, bias_shape) = ctx.plan, ctx.scale, ctx.shapes
        to_bias = grad.new_zeros(bias_shape) if ctx.needs_input_grad[3] else None
        grad = grad.reshape(asked.shape) if ctx.first_only else plan.spread(grad)
        if plan.real is not None and not ctx.first_only:
            grad.mul_(plan.real)  # what lies behind the end of an example has no gradient
        to_asked, to_known, to_given = torch.zeros_like(asked), torch.empty_like(known), torch.empty_like(given)
        to_weights = torch.empty_like(weights)
        for one in plan.clusters:
            to_out = one.of_queries(grad)
            torch.bmm(to_out, one.of_keys(given).transpose(1, 2), out=one.scores(to_weights))
            torch.bmm(one.scores(used).transpose(1, 2), to_out, out=one.of_keys(to_given))
        if keep is not None:
            to_weights.mul_(keep)
        for one in plan.clusters:
            scores = torch._softmax_backward_data(one.scores(to_weights), one.scores(weights), -1, weights.dtype)
            if to_bias is not None:
                by_head = scores.view(-1, q_shape[1], one.queries, one.keys)
                to_bias[:, : one.queries, : one.keys].add_(by_head.sum(0))
            scores.mul_(scale)
            torch.bmm(scores, one.of_keys(known), out=one.of_queries(to_asked))
            torch.bmm(scores.transpose(1, 2), one.of_queries(asked), out=one.of_keys(to_known))
        to_q = to_asked.view(q_shape) if ctx.first_only else plan.gather(to_asked, q_shape)
        return to_q, plan.gather(to_known, k_shape), plan.gather(to_given, k_shape), to_bias, *[None] * 5


def draw_keep_mask(like: torch.Tensor, drop: float) -> torch.Tensor:
    """0 with probability `drop`, else 1 / (1 - drop).

    NumPy's generator takes a quarter of the time of torch's. Its seed comes from torch's generator, so that a resumed or
    repeated step draws the same mask.
    """
    source = np.random.Generator(np.random.SFC64(int(torch.empty((), dtype=torch.int64).random_())))
    numbers = torch.from_numpy(source.random(like.numel(), dtype=np.float32))
    return torch.ge(numbers, drop, out=numbers).mul_(1 / (1 - drop)).to(like.dtype).view_as(like)
