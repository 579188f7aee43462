"""Layers of BERT's kind on a CPU in float32: four nodes of autograd a layer, forward and backward written out (decisions/0117).

Of the last layer the head reads first tokens alone. Keys and values of all tokens are then never made: a query times the
matrix of keys asks hidden states directly, and what a head takes from values is its matrix times a mean of hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.speedups.cpu_speed import draw_keep_masks, in_float32_here, kept_scale, multiply, towards_parameters
from tunesmith.speedups.fused_stack import Copies, FusedStack, LayerParts, parts_of, probability
from tunesmith.speedups.packed_cpu import Kept, attend_spread, differentiate_spread, length_groups, plan_rows
from tunesmith.speedups.packing import Layout


class CpuLayers(FusedStack):
    """The layers of one model; their weights are the model's own, nothing is copied."""

    def _uncalled(self) -> Iterable[nn.Module]:
        return (module for module in self._stack.modules() if module is not self._stack)

    def _copies(self, model: nn.Module) -> Sequence[Copies]:
        self._parts = parts_of(model)
        return ()

    def _forward(self, hidden_states: torch.Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Any:
        """Packed batches that are trained here; others, and all while a hook listens to a layer, as transformers runs them."""
        usual = torch.is_grad_enabled() and in_float32_here(hidden_states) and not self._is_watched()
        if layout is None or not usual:
            given = kwargs if layout is None else {**kwargs, "layout": layout}
            return type(self._stack).forward(self._stack, hidden_states, *args, **given)
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

        x = hidden_states.squeeze(0)
        for parts in self._parts:
            first_only = self.first_token_only and parts is self._parts[-1]
            x = run_layer(parts, x, layout, first_only=first_only, training=self._stack.training)
        return Output(last_hidden_state=x.unsqueeze(0))


def run_layer(parts: LayerParts, x: torch.Tensor, layout: Layout, *, first_only: bool, training: bool) -> torch.Tensor:
    """(tokens, width) of one layer, or (stretches, width) of first tokens."""
    three = [p for m in (parts.query, parts.key, parts.value) for p in (m.weight, m.bias)]
    drops = [probability(drop, training) for drop in (parts.drop_weights, parts.drop_attention, parts.drop_output)]
    values = (len(layout.lengths) if first_only else x.shape[0]) * x.shape[1]
    keeps = draw_keep_masks((_scores_of(layout.lengths, parts.heads, first_only), values, values), drops)
    setting = layout.lengths, parts.heads, parts.attention.scaling, drops[0], keeps[0]
    if first_only:
        context, x = _AttendFirst.apply(x, *three, layout.starts, *setting)  # type: ignore[no-untyped-call]
    else:
        context = _AttendAll.apply(x, *three, *setting)  # type: ignore[no-untyped-call]
    x = norm_of_sum(context, x, parts.attention_output, parts.attention_norm, drops[1], keeps[1])
    wide = _Widened.apply(x, parts.widen.weight, parts.widen.bias)  # type: ignore[no-untyped-call]
    return norm_of_sum(wide, x, parts.narrow, parts.output_norm, drops[2], keeps[2])


def _scores_of(lengths: tuple[int, ...], heads: int, first_only: bool) -> int:
    """How many weights of attention there are."""
    return heads * sum(lengths) if first_only else plan_rows(lengths, heads, False).clusters[-1].weights.stop


def norm_of_sum(
    h: torch.Tensor, residual: torch.Tensor, projection: nn.Linear, norm: nn.LayerNorm, drop: float,
    keep: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The norm of the residual and the projection of `h`, of which `drop` is dropped."""
    given = projection.weight, projection.bias, norm.weight, norm.bias, norm.eps, kept_scale(drop), keep
    out: torch.Tensor = _NormedSum.apply(h, residual, *given)  # type: ignore[no-untyped-call]
    return out


class _NormedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
        scale: torch.Tensor, shift: torch.Tensor, eps: float, up: float, keep: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        total = multiply(h, weight, bias)
        if keep is None:
            total.add_(residual)
        else:
            torch.addcmul(residual, total, keep.view_as(total), value=up, out=total)
        ctx.up = up
        out, mean, spread = torch.native_layer_norm(total, scale.shape, scale, shift, eps)
        ctx.save_for_backward(h, weight, scale, shift, total, mean, spread, keep)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight, scale, shift, total, mean, spread, keep = ctx.saved_tensors
        need_h, need_residual, *need, need_scale, need_shift, _, _, _ = ctx.needs_input_grad
        wanted = [True, need_scale, need_shift]
        to_total, to_scale, to_shift = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), total, scale.shape, mean, spread, scale, shift, wanted
        )
        to_out = to_total
        if keep is not None:
            to_out = torch.addcmul(to_total.new_zeros(()), to_total, keep.view_as(to_total), value=ctx.up)
        to_h = multiply(to_out, weight.t(), None) if need_h else None
        to_residual = to_total if need_residual else None
        return to_h, to_residual, *towards_parameters(to_out, h, need), to_scale, to_shift, None, None, None


class _Widened(torch.autograd.Function):
    """The exact GELU of a projection."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = multiply(x, weight, bias)
        ctx.save_for_backward(x, weight, wide)
        return functional.gelu(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, wide = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad
        to_wide = torch.ops.aten.gelu_backward(grad, wide)
        to_x = multiply(to_wide, weight.t(), None) if need_x else None
        return to_x, *towards_parameters(to_wide, x, need)


class _AttendAll(torch.autograd.Function):
    """(tokens, width): queries, keys and values of all tokens, and the attention within each stretch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, q_weight: torch.Tensor, q_bias: torch.Tensor, k_weight: torch.Tensor,
        k_bias: torch.Tensor, v_weight: torch.Tensor, v_bias: torch.Tensor, lengths: tuple[int, ...], heads: int,
        scale: float, drop: float, keep: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan_rows(lengths, heads, False)
        shape = torch.Size((x.shape[0], heads, q_weight.shape[0] // heads))
        pairs = (q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)
        asked, known, given = (plan.spread(multiply(x, *pair).view(shape)) for pair in pairs)
        out, kept = attend_spread(plan, asked, known, given, scale, drop, keep=keep)
        ctx.save_for_backward(x, q_weight, k_weight, v_weight, asked, known, given, kept.weights, kept.used, keep)
        ctx.plan, ctx.scale, ctx.shape, ctx.kept_scale = plan, scale, shape, kept.scale
        return plan.gather(out, shape).view(x.shape[0], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights, asked, known, given, shares, used, keep = ctx.saved_tensors
        plan, inputs, found = ctx.plan, (asked, known, given), [torch.empty_like(t) for t in (asked, known, given)]
        spread, kept = plan.spread_gradient(grad.reshape(ctx.shape)), Kept(shares, used, keep, ctx.kept_scale)
        differentiate_spread(plan, kept, ctx.scale, spread, inputs, found)
        need_x, *need = ctx.needs_input_grad[:7]
        to_x, parameters = None, list[torch.Tensor | None]()
        for number, weight in enumerate(weights):
            one = plan.gather(found[number], ctx.shape).view(x.shape[0], -1)
            parameters += towards_parameters(one, x, need[2 * number : 2 * number + 2])
            if need_x:
                share = multiply(one, weight.t(), None)
                to_x = share if to_x is None else to_x.add_(share)
        return to_x, *parameters, None, None, None, None, None


class _AttendFirst(torch.autograd.Function):
    """(stretches, width): what first tokens attend to; and the hidden states of first tokens.

    The bias of keys adds the same to all scores of a query, which changes no weight: its gradient is zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, q_weight: torch.Tensor, q_bias: torch.Tensor, k_weight: torch.Tensor,
        k_bias: torch.Tensor, v_weight: torch.Tensor, v_bias: torch.Tensor, starts: torch.Tensor,
        lengths: tuple[int, ...], heads: int, scale: float, drop: float, keep: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        firsts, groups = x.index_select(0, starts), list(length_groups(lengths, heads, True))
        count, width = firsts.shape
        by_head = [w.view(heads, -1, width) for w in (k_weight, v_weight)]
        q = functional.linear(firsts, q_weight, q_bias).view(count, heads, -1).transpose(0, 1)
        asked = torch.bmm(q, by_head[0]).transpose(0, 1).contiguous()  # (stretches, heads, width), as hidden states are
        weights, seen = x.new_empty(groups[-1][2].stop), torch.zeros_like(asked)
        for q_at, k_at, w_at, rows, _, keys in groups:
            scores, hidden = weights[w_at].view(rows, heads, keys), x[k_at].view(rows, keys, width)
            torch.baddbmm(scores, asked[q_at], hidden.transpose(1, 2), beta=0, alpha=scale, out=scores)
            torch.softmax(scores, -1, out=scores)
        keep = None if keep is None else keep * kept_scale(drop)
        used, sums = weights if keep is None else weights * keep, x.new_zeros(count, heads)
        for q_at, k_at, w_at, rows, _, keys in groups:
            shares = used[w_at].view(rows, heads, keys)
            torch.bmm(shares, x[k_at].view(rows, keys, width), out=seen[q_at])
            torch.sum(shares, -1, out=sums[q_at])
        out = torch.bmm(seen.transpose(0, 1), by_head[1].transpose(1, 2))
        out += v_bias.view(heads, 1, -1) * sums.t().unsqueeze(-1)
        ctx.save_for_backward(x, q_weight, *by_head, v_bias, starts, firsts, q, asked, weights, used, keep, seen, sums)
        ctx.groups, ctx.scale = groups, scale
        return out.transpose(0, 1).reshape(count, -1), firsts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, to_firsts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, q_weight, keyed, valued, v_bias, starts, firsts, q, *_, seen, sums = ctx.saved_tensors
        heads, _, width = keyed.shape
        by_head = grad.reshape(-1, heads, valued.shape[1]).transpose(0, 1)
        to_seen = torch.bmm(by_head, valued).transpose(0, 1).contiguous()
        to_sums = (by_head * v_bias.view(heads, 1, -1)).sum(-1).t()
        to_x, to_asked = _towards_hidden(ctx, to_seen, to_sums)
        asked_by_head = to_asked.transpose(0, 1)
        to_q = torch.bmm(asked_by_head, keyed.transpose(1, 2)).transpose(0, 1).reshape(firsts.shape[0], -1)
        if to_x is not None:
            to_x.index_add_(0, starts, torch.addmm(to_firsts, to_q, q_weight))
        need = ctx.needs_input_grad[1:7]
        to_key = torch.bmm(q.transpose(1, 2), asked_by_head).view(-1, width) if need[2] else None
        to_key_bias = grad.new_zeros(q_weight.shape[0]) if need[3] else None
        to_value = torch.bmm(by_head.transpose(1, 2), seen.transpose(0, 1)).view(-1, width) if need[4] else None
        to_value_bias = (by_head * sums.t().unsqueeze(-1)).sum(1).view(-1) if need[5] else None
        to_query = towards_parameters(to_q, firsts, need[:2])
        return to_x, *to_query, to_key, to_key_bias, to_value, to_value_bias, *[None] * 6


def _towards_hidden(ctx: Any, to_seen: torch.Tensor, to_sums: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Gradients of all hidden states, as far as they were looked at, and of what first tokens asked them."""
    x, *_, asked, weights, used, keep, _, _ = ctx.saved_tensors
    (_, heads, width), to_weights = asked.shape, torch.empty_like(weights)
    to_x, to_asked = torch.empty_like(x) if ctx.needs_input_grad[0] else None, torch.zeros_like(asked)
    for q_at, k_at, w_at, rows, _, keys in ctx.groups:
        shares, hidden = to_weights[w_at].view(rows, heads, keys), x[k_at].view(rows, keys, width)
        torch.baddbmm(to_sums[q_at].unsqueeze(-1), to_seen[q_at], hidden.transpose(1, 2), out=shares)
        if to_x is not None:
            before = used[w_at].view(rows, heads, keys).transpose(1, 2)
            torch.bmm(before, to_seen[q_at], out=to_x[k_at].view(rows, keys, width))
    if keep is not None:
        to_weights.mul_(keep)
    for q_at, k_at, w_at, rows, _, keys in ctx.groups:
        probs, hidden = weights[w_at].view(rows, heads, keys), x[k_at].view(rows, keys, width)
        scores = torch._softmax_backward_data(to_weights[w_at].view_as(probs), probs, -1, probs.dtype)
        torch.baddbmm(to_asked[q_at], scores, hidden, beta=0, alpha=ctx.scale, out=to_asked[q_at])
        if to_x is not None:
            to_x[k_at].view(rows, keys, width).baddbmm_(scores.transpose(1, 2), asked[q_at], alpha=ctx.scale)
    return to_x, to_asked
