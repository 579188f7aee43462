"""Run the kernels of ModernBERT's layers in triton's interpreter; called by interpreted.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from interpreted_checks import SEEDS, apart, say
from torch.nn import functional

from equivalence.strategy_cases import (
    RAGGED,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.speedups import fused, fused_ops
from tunesmith.speedups.kernels import layers as modern_kernels
from tunesmith.speedups.packing import enable_padding_free, pack


def check_sum_norm(with_beta: bool, last: bool) -> None:
    """Compare with LayerNorm(residual + h) and autograd; in half precision, the sum is exact and its norm is rounded."""
    torch.manual_seed(0)
    rows, width = 37, 48
    residual = torch.randn(rows, width, requires_grad=True)
    gamma, beta = (torch.randn(width, requires_grad=True) for _ in range(2))
    beta = beta if with_beta else None
    for dtype in (torch.float32, torch.bfloat16):
        name = f"sum_norm {dtype} beta={with_beta} last={last}"
        h = torch.randn(rows, width).to(dtype).requires_grad_()
        stored = torch.float32 if last else dtype
        out = fused_ops._SumNorm.apply(h, residual, gamma, beta, 1e-5, 0.0, SEEDS, 1, stored, not last, True)
        total = residual + h.float()
        normed = functional.layer_norm(total, (width,), gamma, beta, 1e-5)
        half = dtype == torch.bfloat16
        found, expected = ((out,), (normed,)) if last else (out, (total, normed))
        say(f"{name} forward", max(map(apart, found, expected)), 0.04 if half and not last else 1e-5)
        given = [torch.randn_like(x) for x in found]
        leaves = [x for x in (h, residual, gamma, beta) if x is not None]
        ours = torch.autograd.grad(found, leaves, given)
        theirs = torch.autograd.grad(expected, leaves, [g.float() for g in given])
        for which, a, b in zip(("h", "residual", "gamma", "beta"), ours, theirs, strict=False):
            say(f"{name} gradient of {which}", apart(a, b) / float(b.abs().max()), 0.01 if half else 1e-5)


def slope_of(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor) -> float:
    """Return the relative difference between a gradient and its numerical estimate."""
    direction = torch.randn_like(x)
    slope = float((loss(x + 1e-2 * direction) - loss(x - 1e-2 * direction)) / 2e-2)
    return abs(slope - float((gradient * direction).sum())) / abs(slope)


def check_sum_norm_dropout() -> None:
    """Check the gradient numerically; part of h is dropped, the residual never is."""
    torch.manual_seed(0)
    h, residual, one, other = (torch.randn(64, 96) for _ in range(4))
    gamma, options = torch.randn(96), {"drop": 0.3, "seeds": SEEDS, "call": 2}

    def forward(x: torch.Tensor) -> Any:
        return modern_kernels.sum_norm_forward(x, residual, gamma, None, eps=1e-5, dtype=torch.float32, **options)  # type: ignore[arg-type]

    def loss(x: torch.Tensor) -> torch.Tensor:
        total, out, _, _ = forward(x)
        return (total.double() * one + out.double() * other).sum()

    total, _, unit, rstd = forward(h)
    d_h, d_residual, _ = modern_kernels.sum_norm_backward(
        one, other, unit, gamma, rstd, stored=torch.float32, with_beta=False, **options
    )  # type: ignore[arg-type]
    say("sum_norm dropout slope", slope_of(loss, h, d_h), 1e-3)
    kept = (total - residual).abs() > 1e-6
    say("sum_norm dropout of h", apart(total, residual + torch.where(kept, h / 0.7, 0.0)), 1e-5)
    say("sum_norm share kept", abs(float(kept.float().mean()) - 0.7), 0.03)
    say("sum_norm dropout gradients", apart(d_h, torch.where(kept, d_residual / 0.7, 0.0)), 1e-5)


def check_geglu() -> None:
    """Compare with torch's exact GELU, gate and matmul, through autograd; check dropout's gradient numerically."""
    torch.manual_seed(0)
    x, weight = torch.randn(37, 600, requires_grad=True), torch.randn(20, 300, requires_grad=True)
    value, gate = x.chunk(2, dim=-1)
    expected = (functional.gelu(value) * gate) @ weight.t()
    out = fused_ops._GegluLinear.apply(x, weight.detach(), weight, 0.0, SEEDS, 1)
    given = torch.randn_like(expected)
    say("geglu forward", apart(out, expected), 1e-4)
    ours, theirs = (torch.autograd.grad(y, (x, weight), given) for y in (out, expected))
    for which, a, b in zip(("x", "weight"), ours, theirs, strict=True):
        say(f"geglu gradient of {which}", apart(a, b), 2e-4)

    def loss(at: torch.Tensor) -> torch.Tensor:
        made = modern_kernels.geglu_forward(at, drop=0.3, seeds=SEEDS, call=2)
        return (made.double() * d_active.double()).sum()

    d_active = torch.randn(37, 300)
    again, d_x = modern_kernels.geglu_backward(d_active, x.detach(), drop=0.3, seeds=SEEDS, call=2)
    first = modern_kernels.geglu_forward(x.detach(), drop=0.3, seeds=SEEDS, call=2)
    say("geglu again", apart(again, first), 1e-6)
    say("geglu dropout slope", slope_of(loss, x.detach(), d_x), 2e-3)
    say("geglu share kept", abs(float((first != 0).float().mean()) - 0.7), 0.02)


def check_rotation() -> None:
    """Compare outputs and gradients with transformers' function; attention values must not change."""
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    torch.manual_seed(0)
    tokens, heads, size = 11, 3, 16
    angles = torch.randn(tokens, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(tokens, 3 * heads * size).to(dtype).requires_grad_()
        ours = fused_ops._Rotate.apply(packed.clone(), cos, sin, heads).view(tokens, 3, heads, size)
        q, k, v = packed.view(tokens, 3, heads, size).unbind(1)
        expected = torch.stack([*apply_rotary_pos_emb(q, k, cos, sin), v], 1)
        limit = 1e-6 if dtype == torch.float32 else 0.02
        say(f"rotation {dtype} forward", apart(ours, expected), limit)
        given = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, packed, given, retain_graph=True)[0]
        say(f"rotation {dtype} gradient", apart(torch.autograd.grad(ours, packed, given.clone())[0], wanted), limit)
        plain = fused_ops.rotated(packed, cos, sin, heads)
        say(f"rotation {dtype} without triton", apart(plain, expected), limit)


def by_kernels() -> dict[str, Callable[..., Any]]:
    """Replace the CPU functions of fused.py with the kernels that a GPU runs."""

    def sum_norm(h: Any, residual: Any, norm: Any, *, drop: float, seeds: Any, call: int, last: bool) -> Any:
        given = (h, residual, norm.weight, norm.bias, norm.eps, drop, seeds, call, residual.dtype if last else h.dtype)
        out = fused_ops._SumNorm.apply(*given, not last, True)
        return (out, out) if last else out

    def geglu_linear(x: Any, weight: Any, parameter: Any, *, drop: float, seeds: Any, call: int) -> Any:
        return fused_ops._GegluLinear.apply(x, weight, parameter, drop, seeds, call)

    def rotated(packed: Any, cos: Any, sin: Any, heads: int) -> Any:
        return fused_ops._Rotate.apply(packed, cos, sin, heads).view(-1, 3, heads, cos.shape[1])

    def attend_fused(
        firsts: Any, packed: Any, layout: Any, *, scale: float, drop: float, seeds: Any, call: int, window: Any
    ) -> Any:
        return fused_ops._Attention.apply(firsts, packed, layout, scale, drop, seeds, call, window)

    return {"sum_norm": sum_norm, "geglu_linear": geglu_linear, "rotated": rotated, "attend_fused": attend_fused}


def check_layers() -> None:
    """Compare two packed layers that use the kernels with transformers' padded model."""
    model = make_model("modernbert-mean")
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    loss, _, plain = gradients(model, pad_rows(rows, kind="modernbert-mean"), labels)
    strategy = enable_padding_free(model)
    fused.fuse_layers(model, torch.float32, first_token_only=False)
    for name, function in by_kernels().items():
        setattr(fused, name, function)
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, total=64, longest=32)
    ours_loss, _, ours = gradients(model, batch, labels)
    say("layers of modernbert, loss", apart(ours_loss, loss), 1e-6)
    say("layers of modernbert, gradients", largest_difference(plain, ours), 1e-5)


def check_all() -> None:
    """Run all checks of this file."""
    for with_beta, last in ((False, False), (True, False), (False, True)):
        check_sum_norm(with_beta, last)
    check_sum_norm_dropout()
    check_geglu()
    check_rotation()
    check_layers()
