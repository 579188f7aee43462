"""Run the GPU kernels on a CPU in triton's interpreter; tests run this in a separate process with TRITON_INTERPRET=1.

Prints `name found limit` for each check; test_kernels.py compares them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equivalence.strategy_cases import (
    PAD,
    RAGGED,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.speedups import fused_layers, fused_ops
from tunesmith.speedups.fused_ops import attend_by_distance
from tunesmith.speedups.kernels import attention as attention_kernels
from tunesmith.speedups.kernels import layers as triton_kernels
from tunesmith.speedups.kernels.adamw import OneKernelAdamW
from tunesmith.speedups.packing import Layout, PaddingFree, pack

SEEDS = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(5))


def say(name: str, found: float, limit: float) -> None:
    """Print a line for the test to read."""
    print(f"{name.replace(' ', '_')} {found:.6g} {limit:.6g}", flush=True)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference."""
    return float((one.detach().float() - other.detach().float()).abs().max())


def check_add_norm() -> None:
    """Compare with LayerNorm(residual + h + bias) and autograd; in half precision, with the formula on rounded values."""
    torch.manual_seed(0)
    rows, width = 37, 48
    h, residual = torch.randn(rows, width), torch.randn(rows, width, requires_grad=True)
    bias, gamma, beta = (torch.randn(width, requires_grad=True) for _ in range(3))
    for dtype in (torch.float32, torch.bfloat16):
        given = h.to(dtype).float().requires_grad_()
        expected = functional.layer_norm(residual + given + bias, (width,), gamma, beta, 1e-12)
        plain = [t.detach() for t in (h.to(dtype), bias, residual, gamma, beta)]
        out, copy, unit, rstd = triton_kernels.add_norm_forward(
            *plain, eps=1e-12, drop=0.0, seeds=SEEDS, call=1, dtype=dtype
        )
        say(f"add_norm {dtype} forward", apart(out, expected), 1e-5)
        say(f"add_norm {dtype} copy", apart(copy, expected), 1e-5 if dtype == torch.float32 else 0.05)
        d_out, d_copy = torch.randn(rows, width), torch.randn(rows, width).to(dtype)
        d_y = d_out + d_copy.float()
        wanted = torch.autograd.grad(expected, (given, residual, gamma, beta, bias), d_y)
        if dtype == torch.bfloat16:
            say("add_norm kept", apart(unit, (expected - beta) / gamma), 0.02)
            d_unit, x = d_y * plain[3], unit.float()
            d_x = (d_unit - x * (x * d_unit).mean(1, True) - d_unit.mean(1, True)) * rstd[:, None]
            wanted = (d_x, d_x, (d_y * x).sum(0), d_y.sum(0), d_x.sum(0))
        d_h, d_residual, sums = triton_kernels.add_norm_backward(
            d_out, d_copy, unit, plain[3], rstd, drop=0.0, seeds=SEEDS, call=1
        )
        found = (d_h, d_residual, *sums.sum(0).unbind(0))
        limits = (1e-5 if dtype == torch.float32 else 0.1, *[2e-5] * 4)
        for name, a, b, limit in zip(("h", "residual", "gamma", "beta", "bias"), found, wanted, limits, strict=True):
            say(f"add_norm {dtype} gradient of {name}", apart(a, b), limit)


def check_add_norm_function() -> None:
    """Check through autograd that a changed beta is used."""
    torch.manual_seed(0)
    h, residual = torch.randn(5, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True)
    bias, gamma, beta = (torch.nn.Parameter(torch.randn(32)) for _ in range(3))
    for _ in range(2):
        out = fused_ops._AddNorm.apply(h, bias, residual, gamma, beta, 1e-12, 0.0, SEEDS, 1, True)
        expected = functional.layer_norm(residual + h + bias, (32,), gamma, beta, 1e-12)
        say("add_norm with a changed beta", apart(out, expected), 1e-5)
        found, wanted = (torch.autograd.grad(x.square().sum(), (gamma, beta, bias)) for x in (out, expected))
        say("add_norm with a changed beta, gradients", max(map(apart, found, wanted)), 1e-3)
        beta.data = beta.data + 1.0


def check_add_norm_dropout() -> None:
    """Check the gradient numerically, and the share and independence of dropped values."""
    torch.manual_seed(0)
    rows, width, drop = 64, 96, 0.3
    h, residual, direction, weight = (torch.randn(rows, width) for _ in range(4))
    bias, gamma, beta = torch.randn(width), torch.randn(width), torch.randn(width)
    options: Any = {"drop": drop, "seeds": SEEDS, "call": 2}

    def loss(at: float) -> torch.Tensor:
        moved = h + at * direction
        out = triton_kernels.add_norm_forward(
            moved, bias, residual, gamma, beta, eps=1e-12, dtype=torch.float32, **options
        )[0]
        return (out.double() * weight.double()).sum()

    _, _, unit, rstd = triton_kernels.add_norm_forward(
        h, bias, residual, gamma, beta, eps=1e-12, dtype=torch.float32, **options
    )
    d_h, _, _ = triton_kernels.add_norm_backward(weight, None, unit, gamma, rstd, **options)
    slope = float((loss(1e-2) - loss(-1e-2)) / 2e-2)
    say("add_norm dropout slope", abs(slope - float((d_h * direction).sum())) / abs(slope), 1e-3)
    kept = torch.stack([_kept(rows, width, drop, call) for call in range(4)]).double()
    error = (drop * (1 - drop) / kept.numel()) ** 0.5
    say("dropout share kept in standard errors", abs(float(kept.mean()) - (1 - drop)) / error, 4)
    centered = (kept - (1 - drop)) / (drop * (1 - drop)) ** 0.5
    for name, product in {
        "columns": centered[:, :, 1:] * centered[:, :, :-1],
        "rows": centered[:, 1:] * centered[:, :-1],
        "seeds": centered[1:] * centered[:-1],
    }.items():
        say(f"dropout of neighboring {name} in standard errors", abs(float(product.mean())) * product.numel() ** 0.5, 4)


def _kept(rows: int, width: int, drop: float, call: int) -> torch.Tensor:
    zeros = torch.zeros(rows, width)
    out = triton_kernels.add_norm_forward(
        torch.ones(rows, width), zeros[0], zeros, torch.ones(width), zeros[0], eps=1e-12, drop=drop, seeds=SEEDS, call=call,
        dtype=torch.float32,
    )[0]  # fmt: skip
    return out > 0


def check_gelu() -> None:
    """Compare with torch's exact GELU."""
    torch.manual_seed(0)
    x, bias = torch.randn(37, 300, requires_grad=True), torch.randn(300, requires_grad=True)
    expected, given = functional.gelu(x + bias), torch.randn(37, 300)
    wanted = torch.autograd.grad(expected, (x, bias), given)
    say("gelu forward", apart(triton_kernels.bias_gelu_forward(x.detach(), bias.detach()), expected), 1e-5)
    out, d_x, sums = triton_kernels.bias_gelu_backward(given, x.detach(), bias.detach())
    for name, a, b in (("again", out, expected), ("x", d_x, wanted[0]), ("bias", sums.sum(0), wanted[1])):
        say(f"gelu gradient {name}", apart(a, b), 2e-5)


def check_attention(first_only: bool, window: int | None = None) -> None:
    """Compare with softmax per text, of one or several tiles; with dropout, check the gradient numerically."""
    torch.manual_seed(0)
    longest = 300 if window is None else 130  # five tiles: texts of up to 512 tokens
    lengths, heads, size, scale = (5, 64, 70, longest, 1), 2, 16, 0.25
    at = [0, *itertools.accumulate(lengths)]
    packed = torch.randn(at[-1], 3, heads, size)
    q = torch.randn(len(lengths), heads, size) if first_only else packed[:, 0]
    q_at = list(range(len(at))) if first_only else at
    bounds = [torch.tensor(x, dtype=torch.int32) for x in (q_at, at)]
    name = f"attention first_only={first_only} window={window}"

    def forward(q: torch.Tensor, packed: torch.Tensor, drop: float) -> Any:
        return attention_kernels.attention_forward(
            q, packed[:, 1], packed[:, 2], *bounds, q_longest=1 if first_only else max(lengths), longest=max(lengths),
            scale=scale, drop=drop, seeds=SEEDS, call=1, window=window,
        )  # fmt: skip

    def gradients(given: torch.Tensor, drop: float) -> tuple[torch.Tensor, ...]:
        out, lse = forward(q, packed, drop)
        into = torch.full_like(packed, float("nan"))
        d_q = torch.full_like(q, float("nan")) if first_only else into[:, 0]
        attention_kernels.attention_backward(
            given, q, packed[:, 1], packed[:, 2], out, lse, (d_q, into[:, 1], into[:, 2]), *bounds,
            longest=max(lengths), scale=scale, drop=drop, seeds=SEEDS, call=1, window=window,
        )  # fmt: skip
        return d_q, into[:, 1], into[:, 2]

    leaves = [x.clone().requires_grad_() for x in (q, packed[:, 1], packed[:, 2])]
    expected = torch.cat(
        [_softmax(*leaves, slice(*a), slice(*b), scale, window) for a, b in zip(_pairs(q_at), _pairs(at), strict=True)]
    )
    say(f"{name} forward", apart(forward(q, packed, 0.0)[0], expected), 1e-5)
    given = torch.randn_like(expected)
    for which, a, b in zip("qkv", gradients(given, 0.0), torch.autograd.grad(expected, leaves, given), strict=True):
        say(f"{name} gradient of {which}", apart(a, b), 1e-5)
    slopes = gradients(given, 0.3)
    directions = [torch.randn_like(gradient) for gradient in slopes]

    def loss(step: float) -> torch.Tensor:
        """Change q, k and v together."""
        moved = packed.clone()
        for number, direction in enumerate(directions):
            if not (first_only and number == 0):
                moved[:, number] += step * direction
        queries = q + step * directions[0] if first_only else moved[:, 0]
        return (forward(queries, moved, 0.3)[0].double() * given.double()).sum()

    slope = float((loss(5e-3) - loss(-5e-3)) / 1e-2)
    expected_slope = sum(float((a * b).sum()) for a, b in zip(slopes, directions, strict=True))
    say(f"{name} dropout slope", abs(slope - expected_slope), 2e-2)


def _pairs(at: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(at))


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mine: slice, theirs: slice, scale: float, window: int | None
) -> torch.Tensor:
    a, b, c = q[mine].transpose(0, 1), k[theirs].transpose(0, 1), v[theirs].transpose(0, 1)
    scores = a @ b.transpose(1, 2) * scale
    if window is not None:
        places = torch.arange(b.shape[1])
        scores = scores.masked_fill((places[: a.shape[1], None] - places).abs() > window, float("-inf"))
    return (torch.softmax(scores, -1) @ c).transpose(0, 1)


def check_distances(kind: str) -> None:
    """Compare attention by distance with plain torch, per text; with dropout, check the gradients numerically."""
    torch.manual_seed(0)
    lengths, longest, heads, size, scale = (5, 16, 1, 11), 16, 2, 8, 0.3
    at = [0, *itertools.accumulate(lengths)]
    layout = Layout(lengths, longest, *(torch.tensor(x) for x in (at, at[:-1], [0, 1, 2])))
    layout = layout.with_parts(layout.bounds.int(), layout.starts, layout.order)
    given = {"packed": torch.randn(at[-1], 3, heads, size)}
    if kind == "deberta":
        given |= {n: torch.randn(heads, 2 * longest - 1, size) for n in ("as_keys", "as_queries")}
    else:
        given["bias"] = torch.randn(heads, longest, longest)

    def ours(drop: float, **changed: torch.Tensor) -> torch.Tensor:
        return attend_by_distance(
            layout=layout, scale=scale, drop=drop, seeds=SEEDS, call=1, **{**given, **changed}
        )  # fmt: skip

    def plain(packed: torch.Tensor, as_keys: Any = None, as_queries: Any = None, bias: Any = None) -> torch.Tensor:
        out = []
        for start, end in itertools.pairwise(at):
            q, k, v = packed[start:end].permute(1, 2, 0, 3)
            place = torch.arange(end - start)
            scores = q @ k.transpose(1, 2)
            if as_keys is not None:
                scores = scores + (q[:, :, None] * as_keys[:, longest - 1 - place[:, None] + place]).sum(-1)
                scores = scores + (k[:, None] * as_queries[:, longest - 1 - place + place[:, None]]).sum(-1)
            scores = scores * scale + (0.0 if bias is None else bias[:, : end - start, : end - start])
            out.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
        return torch.cat(out)

    leaves = {n: t.clone().requires_grad_() for n, t in given.items()}
    expected, found = plain(**leaves), ours(0.0, **leaves)
    say(f"{kind} forward", apart(found, expected), 1e-5)
    weight = torch.randn_like(expected)
    wanted, had = (torch.autograd.grad(x, list(leaves.values()), weight) for x in (expected, found))
    for name, a, b in zip(leaves, had, wanted, strict=True):
        say(f"{kind} gradient of {name}", apart(a, b), 2e-5)
    slopes = torch.autograd.grad(ours(0.3, **leaves), list(leaves.values()), weight)
    for name, gradient in zip(leaves, slopes, strict=True):
        direction = torch.randn_like(gradient)
        ends = [
            (ours(0.3, **{name: given[name] + step * direction}).double() * weight.double()).sum()
            for step in (1e-2, -1e-2)
        ]
        slope = float(ends[0] - ends[1]) / 2e-2
        say(f"{kind} dropout slope of {name}", abs(slope - float((gradient * direction).sum())), 2e-2)


def check_distances_in_layers(kind: str) -> None:
    """Compare fused layers that use the kernels with transformers' padded model."""
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    loss, _, plain = gradients(model, pad_rows(rows, kind=kind), labels)
    strategy = PaddingFree(model)
    fused_layers.FusedLayers(model, torch.float32, first_token_only=True)
    used: list[bool] = []
    fused_layers.attends_fused = lambda *_: used.append(True) or True  # type: ignore[func-returns-value]
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, total=64, longest=32)
    ours_loss, _, ours = gradients(model, batch, labels)
    say(f"{kind} in layers, not used", float(not used), 0.5)
    say(f"{kind} in layers, loss", abs(loss - ours_loss), 1e-6)
    say(f"{kind} in layers, gradients", largest_difference(plain, ours), 1e-5)


def check_adamw() -> None:
    """Compare 20 steps, one of them skipped, with torch.optim.AdamW; half-precision copies must follow the weights."""
    torch.manual_seed(0)
    one = [torch.nn.Parameter(torch.randn(n)) for n in (9000, 7, 300)]
    other = [torch.nn.Parameter(p.detach().clone()) for p in one]
    theirs, ours = (
        torch.optim.AdamW([{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:], "weight_decay": 0.0}], lr=1e-2)
        for ps in (one, other)
    )
    ours.param_groups[0]["lr"] = torch.tensor(1e-2)  # the other group's is a float
    copy = torch.zeros(9000, dtype=torch.bfloat16)
    kernel = OneKernelAdamW(ours, {other[0]: copy})
    for step in range(20):
        for a, b in zip(one, other, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad * 3
        if step == 10:  # as in a CUDA graph: computed on the device in float64
            theirs.param_groups[1]["lr"] = 5e-3
            ours.param_groups[1]["lr"] = torch.tensor(5e-3, dtype=torch.float64)
        if step != 5:
            theirs.step()
        kernel.step(torch.tensor(3.0), torch.tensor(float(step == 5)))
        if step == 0:
            say("adamw after one step", max(apart(a, b) for a, b in zip(one, other, strict=True)), 1e-6)
    say("adamw after 20 steps", max(apart(a, b) for a, b in zip(one, other, strict=True)), 1e-5)
    moments = [optimizer.state[p]["exp_avg_sq"] for optimizer, p in ((theirs, one[0]), (ours, other[0]))]
    say("adamw moments, of their size", float(((moments[0] - moments[1]) / moments[0]).abs().max()), 2e-6)
    say("adamw count of steps", abs(float(ours.state[other[0]]["step"]) - 19), 0)
    say("adamw copy", apart(copy, other[0]), 0.04)


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
        return triton_kernels.sum_norm_forward(x, residual, gamma, None, eps=1e-5, dtype=torch.float32, **options)  # type: ignore[arg-type]

    def loss(x: torch.Tensor) -> torch.Tensor:
        total, out, _, _ = forward(x)
        return (total.double() * one + out.double() * other).sum()

    total, _, unit, rstd = forward(h)
    d_h, d_residual, _ = triton_kernels.sum_norm_backward(
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
        made = triton_kernels.geglu_forward(at, drop=0.3, seeds=SEEDS, call=2)
        return (made.double() * d_active.double()).sum()

    d_active = torch.randn(37, 300)
    again, d_x = triton_kernels.geglu_backward(d_active, x.detach(), drop=0.3, seeds=SEEDS, call=2)
    first = triton_kernels.geglu_forward(x.detach(), drop=0.3, seeds=SEEDS, call=2)
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
    """Replace the CPU functions of fused_layers.py with the kernels that a GPU runs."""

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
    strategy = PaddingFree(model)
    fused_layers.fuse_layers(model, torch.float32, first_token_only=False)
    for name, function in by_kernels().items():
        setattr(fused_layers, name, function)
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, total=64, longest=32)
    ours_loss, _, ours = gradients(model, batch, labels)
    say("layers of modernbert, loss", apart(ours_loss, loss), 1e-6)
    say("layers of modernbert, gradients", largest_difference(plain, ours), 1e-5)


if __name__ == "__main__":
    check_add_norm()
    check_add_norm_function()
    check_add_norm_dropout()
    check_gelu()
    for first_only in (False, True):
        check_attention(first_only)
    for kind in ("mpnet", "deberta"):
        check_distances(kind)
    for kind in ("mpnet", "deberta-v2"):
        check_distances_in_layers(kind)
    for window in (3, 64):
        check_attention(False, window)
    check_adamw()
    for with_beta, last in ((False, False), (True, False), (False, True)):
        check_sum_norm(with_beta, last)
    check_sum_norm_dropout()
    check_geglu()
    check_rotation()
    check_layers()
