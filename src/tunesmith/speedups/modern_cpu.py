"""ModernBERT on a CPU: rotary attention of packed rows and the gated feed-forward in few passes, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.models.families import Anatomy
from tunesmith.speedups.attention import binding
from tunesmith.speedups.cpu_speed import in_float32_here
from tunesmith.speedups.packed_cpu import Kept, attend_spread, differentiate_spread, plan_rows
from tunesmith.speedups.packing import Layout
from tunesmith.speedups.relative_rows import replace_method


def quicken_modern(anatomy: Anatomy) -> list[Callable[[], None]]:
    """Other forwards for the attention and the feed-forward of each layer; what comes back undoes it."""
    undo = list[Callable[[], None]]()
    for layer in anatomy.layers or ():
        own: Any = layer
        undo.append(replace_method(own.attn, "forward", _TurnedAttention(own.attn).forward))
        undo.append(replace_method(own.mlp, "forward", _GatedFeedForward(own.mlp).forward))
    return undo


class _TurnedAttention:
    def __init__(self, own: Any) -> None:
        self._own = own

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """Packed batches that are trained here; others as transformers has them."""
        own, layout = self._own, kwargs.get("layout")
        if layout is None or not in_float32_here(hidden_states) or not torch.is_grad_enabled():
            return type(own).forward(own, hidden_states, position_embeddings=position_embeddings, **kwargs)
        qkv = own.Wqkv(hidden_states).view(hidden_states.shape[1], 3, -1, own.head_dim)
        cos, sin = (x.squeeze(0) for x in position_embeddings)
        drop = own.attention_dropout if own.training else 0.0
        window = None if own.sliding_window is None else own.sliding_window - 1
        found = attend_rotary(qkv, cos, sin, layout, own.head_dim**-0.5, drop, window)
        return own.out_drop(own.Wo(found.view(hidden_states.shape[0], hidden_states.shape[1], -1))), None


class _GatedFeedForward:
    def __init__(self, own: Any) -> None:
        self._own = own

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Exact GELU in float32 here; anything else as transformers has it."""
        own = self._own
        if not in_float32_here(hidden_states) or own.config.hidden_activation != "gelu" or not torch.is_grad_enabled():
            plain: torch.Tensor = type(own).forward(own, hidden_states)
            return plain
        gated: torch.Tensor = _GatedGelu.apply(own.Wi(hidden_states))  # type: ignore[no-untyped-call]
        out: torch.Tensor = own.Wo(own.drop(gated))
        return out


class _GatedGelu(torch.autograd.Function):
    """GELU(first half) x second half."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, -1)
        active = functional.gelu(value)
        ctx.save_for_backward(x, active)
        return active * gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, active = ctx.saved_tensors
        (value, gate), found = x.chunk(2, -1), torch.empty_like(x)
        if torch.is_grad_enabled():  # a second derivative is wanted
            to_value: torch.Tensor = torch.ops.aten.gelu_backward(grad * gate, value)
            return torch.cat([to_value, grad * functional.gelu(value)], -1)
        to_value, to_gate = found.chunk(2, -1)
        torch.mul(grad, active, out=to_gate)
        torch.ops.aten.gelu_backward.grad_input(grad * gate, value, grad_input=to_value)
        return found


def attend_rotary(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Layout,
    scale: float,
    drop: float,
    window: int | None,
) -> torch.Tensor:
    """(tokens, heads, size) from queries, keys and values (tokens, 3, heads, size) and the angles (tokens, size)."""
    found: torch.Tensor = _RotaryAttention.apply(  # type: ignore[no-untyped-call]
        qkv, cos, sin, layout.lengths, scale, drop, binding(window, layout)
    )
    return found


@lru_cache(maxsize=8)
def _places(lengths: tuple[int, ...], heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `into` and `back` of a plan, for queries, keys and values that lie side by side; and the token of each place."""
    plan = plan_rows(lengths, heads, False)
    token, part = plan.into // heads, torch.arange(3)
    into = (token * 3 * heads + plan.into % heads) + part.unsqueeze(1) * heads
    back = plan.back.view(-1, 1, heads) + part.view(1, 3, 1) * len(token)
    return into.flatten(), back.flatten(), token


class _RotaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: tuple[int, ...],
        scale: float, drop: float, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        _, _, heads, size = qkv.shape
        plan = plan_rows(lengths, heads, False, window)
        into, _, token = _places(lengths, heads)
        spread = qkv.reshape(-1, size).index_select(0, into).view(3, -1, size)
        angles = [x.index_select(0, token) for x in (cos, sin)]
        turned = _turn(spread[:2], *angles)
        out, kept = attend_spread(plan, turned[0], turned[1], spread[2], scale, drop)
        ctx.save_for_backward(turned, spread[2], *angles, kept.weights, kept.used, kept.keep)
        ctx.plan, ctx.lengths, ctx.scale, ctx.shape, ctx.kept_scale = plan, lengths, scale, qkv.shape, kept.scale
        return plan.gather(out, torch.Size((qkv.shape[0], heads, size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        turned, given, cos, sin, weights, used, keep = ctx.saved_tensors
        plan, (tokens, _, heads, size) = ctx.plan, ctx.shape
        found = given.new_empty(3, *given.shape)
        inputs = (turned[0], turned[1], given)
        kept = Kept(weights, used, keep, ctx.kept_scale)
        differentiate_spread(plan, kept, ctx.scale, plan.spread_gradient(grad), inputs, found)
        found[:2] = _turn(found[:2], cos, -sin.roll(size // 2, -1))
        _, back, _ = _places(ctx.lengths, heads)
        to_qkv = found.view(-1, size).index_select(0, back).view(-1, 3, heads, size)
        if to_qkv.shape[0] < tokens:
            to_qkv = functional.pad(to_qkv, (0, 0, 0, 0, 0, 0, 0, tokens - to_qkv.shape[0]))
        return to_qkv, None, None, None, None, None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (..., size) turned by the angles: the halves of each vector are the coordinates."""
    (first, second), out = x.chunk(2, -1), x * cos
    to_first, to_second = out.chunk(2, -1)
    by_first, by_second = sin.chunk(2, -1)
    to_first.addcmul_(second, by_first, value=-1)
    to_second.addcmul_(first, by_second)
    return out
