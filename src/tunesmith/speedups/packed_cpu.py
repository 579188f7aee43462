"""Packed attention on the CPU: tokens laid out head by head, stretches of similar length in one batched product, forward and
backward written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.speedups.cpu_speed import draw_keep_mask, kept_scale
from tunesmith.speedups.packing import Layout

CALLS = 8192
"""Scores that take as long as the calls for one more cluster, forward and backward."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Stretches that share products, each laid out as long as the longest of them."""

    asked: slice
    """Where the queries lie among those of all clusters."""
    known: slice
    """The same of keys and of values."""
    weights: slice
    count: int
    queries: int
    keys: int
    mask: torch.Tensor | None
    """float32, added to scores (count, heads, queries, keys): minus infinity where no key is to be seen; None: all are."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Places of tokens and heads in the order (cluster, stretch, head, token of the stretch)."""

    clusters: tuple[Cluster, ...]
    into: torch.Tensor
    """int64 (places): token x heads + head of what lies there; beyond the end of a stretch it is the stretch's last token."""
    back: torch.Tensor
    """int64 (tokens x heads): the place of each."""
    real: torch.Tensor | None
    """float32 (places, 1): 0 beyond the end of a stretch, else 1; None where no stretch has such places."""

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """(places, size) from (tokens, heads, size)."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.into)

    def spread_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """The same, with zero beyond the end of a stretch."""
        found = self.spread(x)
        return found if self.real is None else found.mul_(self.real)

    def gather(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(tokens, heads, size) from (places, size); zero for tokens of no stretch."""
        found, missing = x.index_select(0, self.back), shape[0] * shape[1] - self.back.shape[0]
        if missing:
            found = torch.cat([found, found.new_zeros(missing, shape[2])])
        return found.view(shape)


@lru_cache(maxsize=8)
def plan_rows(lengths: tuple[int, ...], heads: int, first_only: bool, window: int | None = None) -> RowPlan:
    """For stretches of these lengths; all layers of a batch share it."""
    starts, clusters = np.concatenate(([0], np.cumsum(lengths))), list[Cluster]()
    into, real = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    known = weights = 0
    for first, end in _bounds(lengths, heads, first_only):
        sizes, count = np.array(lengths[first:end])[:, None], end - first
        keys = int(sizes.max())
        place, queries = np.arange(keys), 1 if first_only else keys
        token, there = starts[first:end, None] + np.minimum(place, sizes - 1), place < sizes
        into.append((token[:, None] * heads + np.arange(heads)[:, None]).ravel())
        real.append(np.repeat(there[:, None], heads, axis=1).ravel())
        k_at = slice(known, known + count * heads * keys)
        q_at = slice(first * heads, end * heads) if first_only else k_at
        w_at = slice(weights, weights + count * heads * queries * keys)
        clusters.append(Cluster(q_at, k_at, w_at, count, queries, keys, _mask(there, queries, window)))
        known, weights = k_at.stop, w_at.stop
    source, is_real = np.concatenate(into), np.concatenate(real)
    back = np.empty(starts[-1] * heads, dtype=np.int64)
    back[source[is_real]] = np.flatnonzero(is_real)
    shorter = None if is_real.all() else torch.from_numpy(is_real.astype(np.float32)).unsqueeze(1)
    return RowPlan(tuple(clusters), torch.from_numpy(source), torch.from_numpy(back), shorter)


def _bounds(lengths: tuple[int, ...], heads: int, first_only: bool) -> list[tuple[int, int]]:
    """(first, end) of the stretches of each cluster. A packed batch is sorted by length, so neighbours are similar."""
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
    if far is not None:  # what lies beyond the end of a stretch, and further than the window, would see no key at all
        hidden = (hidden | far) & inside[:, None, :queries, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if bool(hidden.any()) else None


def too_far(queries: int, keys: int, window: int | None) -> torch.Tensor | None:
    """bool (queries, keys): further apart than `window`; None where nothing is."""
    if window is None or keys - 1 <= window:
        return None
    places = torch.arange(keys)
    return (places[:queries, None] - places).abs() > window


def attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(queries, heads, head size): softmax attention of each stretch, its weights dropped with probability `dropout`.

    `bias` (heads, longest, longest) is added to the scores of each pair of places.
    """
    if not torch.is_grad_enabled() and dropout == 0.0:
        return _attend_without_gradient(q, k, v, layout.lengths, first_only, scale, window, bias)
    out: torch.Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, bias, layout.lengths, first_only, scale, dropout, window
    )
    return out


LengthGroup = tuple[slice, slice, slice, int, int, int]
"""Where the queries, the keys and the weights of a group lie; stretches in it, queries and keys of each."""


def length_groups(lengths: tuple[int, ...], heads: int, first_only: bool) -> Iterator[LengthGroup]:
    """Runs of stretches of equal length (a packed batch is sorted by length)."""
    q_at = k_at = w_at = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        queries = 1 if first_only else length
        q_end, k_end, w_end = q_at + count * queries, k_at + count * length, w_at + count * heads * queries * length
        if length:
            yield slice(q_at, q_end), slice(k_at, k_end), slice(w_at, w_end), count, queries, length
        q_at, k_at, w_at = q_end, k_end, w_end


def _attend_without_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], first_only: bool, scale: float,
    window: int | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """For prediction: nothing is kept for a backward pass, so torch's own kernel may go through the scores in blocks.

    2.2x quicker at 512 tokens, 1.4x at 128; below 40 the copies of `_PackedAttention` cost as much.
    """
    heads, size = q.shape[1:]
    out = q.new_empty(q.shape)
    for q_at, k_at, _, count, queries, keys in length_groups(lengths, heads, first_only):
        asked = q[q_at].view(count, queries, heads, size).transpose(1, 2)
        known, given = (x[k_at].view(count, keys, heads, size).transpose(1, 2) for x in (k, v))
        far = too_far(queries, keys, window)
        near = None if far is None else ~far
        if bias is not None:
            near = bias[:, :queries, :keys]
        found = functional.scaled_dot_product_attention(asked, known, given, attn_mask=near, scale=scale)
        out[q_at].view(count, queries, heads, size).copy_(found.transpose(1, 2))
    return out


def _cut(x: torch.Tensor, at: slice, length: int) -> torch.Tensor:
    """(stretches x heads, length, size): those of one cluster."""
    return x[at].view(-1, length, x.shape[-1])


@dataclass(frozen=True, slots=True)
class Kept:
    """What the backward pass of an attention needs besides queries, keys and values."""

    weights: torch.Tensor
    used: torch.Tensor
    """Those that were kept, and zero for the others."""
    keep: torch.Tensor | None
    scale: float = 1.0
    """Of what was kept."""


def attend_spread(
    plan: RowPlan, asked: torch.Tensor, known: torch.Tensor, given: torch.Tensor, scale: float, dropout: float,
    bias: torch.Tensor | None = None, keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Kept]:  # fmt: skip
    """The attention of queries, keys and values that lie as the plan has them; without a `keep` the mask is drawn here."""
    weights = asked.new_empty(plan.clusters[-1].weights.stop)
    for one in plan.clusters:
        scores = weights[one.weights].view(-1, one.queries, one.keys)
        left, right = _cut(asked, one.asked, one.queries), _cut(known, one.known, one.keys)
        torch.baddbmm(scores, left, right.transpose(1, 2), beta=0, alpha=scale, out=scores)
        by_head = scores.view(one.count, -1, one.queries, one.keys)
        if bias is not None:
            by_head.add_(bias[:, : one.queries, : one.keys])
        if one.mask is not None:
            by_head.add_(one.mask)
        torch.softmax(scores, -1, out=scores)
    if keep is None and dropout > 0:
        keep = draw_keep_mask(weights.numel(), dropout).to(asked.dtype)
    kept = Kept(weights, weights if keep is None else weights * keep, keep, kept_scale(dropout))
    whole = sum(one.asked.stop - one.asked.start for one in plan.clusters) == asked.shape[0]
    out = asked.new_empty(asked.shape) if whole else asked.new_zeros(asked.shape)
    for one in plan.clusters:
        shares, values = kept.used[one.weights].view(-1, one.queries, one.keys), _cut(given, one.known, one.keys)
        place = _cut(out, one.asked, one.queries)
        torch.baddbmm(place, shares, values, beta=0, alpha=kept.scale, out=place)
    return out, kept


def differentiate_spread(
    plan: RowPlan, kept: Kept, scale: float, grad: torch.Tensor, inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor], to_bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the gradients of queries, keys and values to `found` and adds that of the bias to `to_bias`.

    `grad` is 0 beyond the end of a stretch.
    """
    (asked, known, given), (to_asked, to_known, to_given) = inputs, found
    to_weights = torch.empty_like(kept.weights)
    for one in plan.clusters:
        shares, to_out = kept.used[one.weights].view(-1, one.queries, one.keys), _cut(grad, one.asked, one.queries)
        values, to_values = (_cut(x, one.known, one.keys) for x in (given, to_given))
        to_shares = to_weights[one.weights].view_as(shares)
        torch.baddbmm(to_shares, to_out, values.transpose(1, 2), beta=0, alpha=kept.scale, out=to_shares)
        torch.baddbmm(to_values, shares.transpose(1, 2), to_out, beta=0, alpha=kept.scale, out=to_values)
    if kept.keep is not None:
        to_weights.mul_(kept.keep)
    for one in plan.clusters:
        probs = kept.weights[one.weights].view(-1, one.queries, one.keys)
        scores = torch._softmax_backward_data(to_weights[one.weights].view_as(probs), probs, -1, probs.dtype)
        if to_bias is not None:
            by_head = scores.view(one.count, -1, one.queries, one.keys)
            to_bias[:, : one.queries, : one.keys].add_(by_head.sum(0))
        left, to_left = (_cut(x, one.asked, one.queries) for x in (asked, to_asked))
        right, to_right = (_cut(x, one.known, one.keys) for x in (known, to_known))
        torch.baddbmm(to_left, scores, right, beta=0, alpha=scale, out=to_left)
        torch.baddbmm(to_right, scores.transpose(1, 2), left, beta=0, alpha=scale, out=to_right)


class _PackedAttention(torch.autograd.Function):
    """One node for all stretches: autograd's bookkeeping per stretch would cost more than the products."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, lengths: tuple[int, ...],
        first_only: bool, scale: float, dropout: float, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan_rows(lengths, q.shape[1], first_only, window)
        asked = q.reshape(-1, q.shape[2]) if first_only else plan.spread(q)
        known, given = plan.spread(k), plan.spread(v)
        out, kept = attend_spread(plan, asked, known, given, scale, dropout, bias)
        ctx.save_for_backward(asked, known, given, kept.weights, kept.used, kept.keep)
        ctx.plan, ctx.scale, ctx.first_only, ctx.kept_scale = plan, scale, first_only, kept.scale
        ctx.shapes = q.shape, k.shape, None if bias is None else bias.shape
        return out.view(q.shape) if first_only else plan.gather(out, q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, weights, used, keep = ctx.saved_tensors
        plan, (q_shape, k_shape, bias_shape) = ctx.plan, ctx.shapes
        to_bias = grad.new_zeros(bias_shape) if ctx.needs_input_grad[3] else None
        grad = grad.reshape(inputs[0].shape) if ctx.first_only else plan.spread_gradient(grad)
        found = [torch.zeros_like(inputs[0]), *(torch.empty_like(x) for x in inputs[1:])]
        differentiate_spread(plan, Kept(weights, used, keep, ctx.kept_scale), ctx.scale, grad, inputs, found, to_bias)
        to_q = found[0].view(q_shape) if ctx.first_only else plan.gather(found[0], q_shape)
        return to_q, plan.gather(found[1], k_shape), plan.gather(found[2], k_shape), to_bias, *[None] * 5
