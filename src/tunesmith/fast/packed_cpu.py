"""Packed attention on the CPU: stretches of similar length in one batched product, forward and backward written out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.fast.packing import Layout
from tunesmith.fast.random_mask import draw_keep_mask
from tunesmith.fast.row_plan import RowPlan, plan_rows, too_far


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
    """The weights after dropout."""
    keep: torch.Tensor | None


def attend_spread(
    plan: RowPlan, asked: torch.Tensor, known: torch.Tensor, given: torch.Tensor, scale: float, dropout: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Kept]:  # fmt: skip
    """The attention of queries, keys and values that lie as the plan has them."""
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
    keep = draw_keep_mask(weights.numel(), dropout).to(asked.dtype) if dropout > 0 else None
    used = weights if keep is None else weights * keep
    whole = sum(one.asked.stop - one.asked.start for one in plan.clusters) == asked.shape[0]
    out = asked.new_empty(asked.shape) if whole else asked.new_zeros(asked.shape)
    for one in plan.clusters:
        shares, values = used[one.weights].view(-1, one.queries, one.keys), _cut(given, one.known, one.keys)
        torch.bmm(shares, values, out=_cut(out, one.asked, one.queries))
    return out, Kept(weights, used, keep)


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
        values = _cut(given, one.known, one.keys)
        torch.bmm(to_out, values.transpose(1, 2), out=to_weights[one.weights].view_as(shares))
        torch.bmm(shares.transpose(1, 2), to_out, out=_cut(to_given, one.known, one.keys))
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
        ctx.plan, ctx.scale, ctx.first_only = plan, scale, first_only
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
        differentiate_spread(plan, Kept(weights, used, keep), ctx.scale, grad, inputs, found, to_bias)
        to_q = found[0].view(q_shape) if ctx.first_only else plan.gather(found[0], q_shape)
        return to_q, plan.gather(found[1], k_shape), plan.gather(found[2], k_shape), to_bias, *[None] * 5
