"""Packed attention on the CPU: stretches of similar length in one batched product, forward and backward written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.fast.packing import Layout
from tunesmith.fast.random_mask import draw_keep_mask
from tunesmith.fast.row_plan import plan_rows, too_far


def attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """(queries, heads, head size): softmax attention of each stretch, its weights dropped with probability `dropout`."""
    if not torch.is_grad_enabled() and dropout == 0.0:
        return _attend_without_gradient(q, k, v, layout.lengths, first_only, scale, window)
    out: torch.Tensor = _PackedAttention.apply(q, k, v, layout.lengths, first_only, scale, dropout, window)  # type: ignore[no-untyped-call]
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
    window: int | None,
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
        found = functional.scaled_dot_product_attention(asked, known, given, attn_mask=near, scale=scale)
        out[q_at].view(count, queries, heads, size).copy_(found.transpose(1, 2))
    return out


def _cut(x: torch.Tensor, at: slice, length: int) -> torch.Tensor:
    """(stretches x heads, length, size): those of one cluster."""
    return x[at].view(-1, length, x.shape[-1])


class _PackedAttention(torch.autograd.Function):
    """One node for all stretches: autograd's bookkeeping per stretch would cost more than the products."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], first_only: bool,
        scale: float, dropout: float, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        heads, size = q.shape[1:]
        plan = plan_rows(lengths, heads, first_only, window)
        asked = q.reshape(-1, size) if first_only else plan.spread(q)
        known, given = plan.spread(k), plan.spread(v)
        weights = q.new_empty(plan.clusters[-1].weights.stop)
        for one in plan.clusters:
            scores = weights[one.weights].view(-1, one.queries, one.keys)
            left, right = _cut(asked, one.asked, one.queries), _cut(known, one.known, one.keys)
            torch.baddbmm(scores, left, right.transpose(1, 2), beta=0, alpha=scale, out=scores)
            if one.mask is not None:
                scores.view(one.count, heads, one.queries, one.keys).add_(one.mask)
            torch.softmax(scores, -1, out=scores)
        keep = draw_keep_mask(weights.numel(), dropout).to(q.dtype) if dropout > 0 else None
        used = weights * keep if keep is not None else weights
        out = torch.zeros_like(asked) if first_only else torch.empty_like(asked)
        for one in plan.clusters:
            shares, values = used[one.weights].view(-1, one.queries, one.keys), _cut(given, one.known, one.keys)
            torch.bmm(shares, values, out=_cut(out, one.asked, one.queries))
        ctx.save_for_backward(asked, known, given, weights, used if keep is not None else None, keep)
        ctx.plan, ctx.scale, ctx.first_only, ctx.shapes = plan, scale, first_only, (q.shape, k.shape)
        return out.view(q.shape) if first_only else plan.gather(out, q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        asked, known, given, weights, used, keep = ctx.saved_tensors
        plan, (q_shape, k_shape), used = ctx.plan, ctx.shapes, weights if used is None else used
        grad = grad.reshape(asked.shape) if ctx.first_only else plan.spread(grad)
        if plan.real is not None and not ctx.first_only:
            grad.mul_(plan.real)  # nothing is asked for beyond the end of a stretch
        to_asked, to_known, to_given = torch.zeros_like(asked), torch.empty_like(known), torch.empty_like(given)
        to_weights = torch.empty_like(weights)
        for one in plan.clusters:
            shares, to_out = used[one.weights].view(-1, one.queries, one.keys), _cut(grad, one.asked, one.queries)
            values = _cut(given, one.known, one.keys)
            torch.bmm(to_out, values.transpose(1, 2), out=to_weights[one.weights].view_as(shares))
            torch.bmm(shares.transpose(1, 2), to_out, out=_cut(to_given, one.known, one.keys))
        if keep is not None:
            to_weights.mul_(keep)
        for one in plan.clusters:
            probs = weights[one.weights].view(-1, one.queries, one.keys)
            scores = torch._softmax_backward_data(to_weights[one.weights].view_as(probs), probs, -1, probs.dtype)
            left, to_left = (_cut(x, one.asked, one.queries) for x in (asked, to_asked))
            right, to_right = (_cut(x, one.known, one.keys) for x in (known, to_known))
            torch.baddbmm(to_left, scores, right, beta=0, alpha=ctx.scale, out=to_left)
            torch.baddbmm(to_right, scores.transpose(1, 2), left, beta=0, alpha=ctx.scale, out=to_right)
        to_q = to_asked.view(q_shape) if ctx.first_only else plan.gather(to_asked, q_shape)
        return to_q, plan.gather(to_known, k_shape), plan.gather(to_given, k_shape), None, None, None, None, None
