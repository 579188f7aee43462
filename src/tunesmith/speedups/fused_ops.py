"""The operations of a fused encoder layer, with few passes over memory: Triton kernels if available, torch otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.speedups.packing import Layout, attend_packed, binding
from tunesmith.training.distributed import has_triton


def weight_gradient(d_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return d_out.T @ x in float32, from half-precision factors and without rounding the sum."""
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return (d_out.t() @ x).float()
    return torch.mm(d_out.t(), x, out_dtype=torch.float32)


class _Ones:
    """Vectors of ones that stay in place, because CUDA graphs still read shorter ones after a longer one was made."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def __call__(self, count: int, like: torch.Tensor) -> torch.Tensor:
        kept = self._kept.setdefault((like.device, like.dtype), [])
        if not kept or kept[-1].shape[0] < count:
            kept.append(torch.ones(max(4096, 2 * count), dtype=like.dtype, device=like.device))
        return kept[-1][:count]


ones = _Ones()


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 sum over the first dimension; a matmul with ones takes half the time of torch's sum on a GPU."""
    if x.device.type != "cuda":
        return x.sum(0, dtype=torch.float32)
    flat = x.reshape(x.shape[0], -1)
    if x.dtype == torch.float32:  # gemv never rounds to TF32
        return torch.mv(flat.t(), ones(x.shape[0], x)).view(x.shape[1:])
    return torch.mm(ones(x.shape[0], x).unsqueeze(0), flat, out_dtype=torch.float32).view(x.shape[1:])


class _CopiedLinear(torch.autograd.Function):
    """x @ weight.T (+ bias), computed with half-precision copies; gradients go to the original parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = [p.shape[0] for p in parameters if p.dim() == 2]
        ctx.with_bias = bias is not None
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grads: list[torch.Tensor | None] = [None] * (len(wanted) - 3)
        count = len(ctx.sizes)
        if any(wanted[3 : 3 + count]):
            grads[:count] = weight_gradient(d_out, x).split_with_sizes(ctx.sizes)
        if ctx.with_bias and any(wanted[3 + count :]):
            grads[count:] = sum_rows(d_out).split_with_sizes(ctx.sizes)
        d_x = d_out @ weight if wanted[0] else None
        return (d_x, None, None, *(g if need else None for g, need in zip(grads, wanted[3:], strict=True)))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *parameters: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T + bias. `parameters` are the originals of `weight` and then of `bias`, in order."""
    out: torch.Tensor = _CopiedLinear.apply(x, weight, bias, *parameters)  # type: ignore[no-untyped-call]
    return out


class _GeluLinear(torch.autograd.Function):
    """GELU(x + bias) @ weight.T. The activation is recomputed in the backward pass, which halves the memory of the layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        if x.device.type == "cuda" and has_triton():
            from tunesmith.speedups.kernels.layers import bias_gelu_forward

            return bias_gelu_forward(x, bias) @ weight.t()
        return functional.gelu(x + bias.to(x.dtype)) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, bias, weight = ctx.saved_tensors
        d_active = d_out @ weight
        if x.device.type == "cuda" and has_triton():
            from tunesmith.speedups.kernels.layers import bias_gelu_backward

            active, d_x, sums = bias_gelu_backward(d_active, x, bias)
        else:
            value = x + bias.to(x.dtype)
            active = functional.gelu(value)
            d_x = sums = torch.ops.aten.gelu_backward(d_active, value)
        _, bias_too, _, weight_too = ctx.needs_input_grad
        d_bias = sum_rows(sums) if bias_too else None
        d_weight = weight_gradient(d_out, active) if weight_too else None
        return d_x, d_bias, None, d_weight


def gelu_linear(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return GELU(x + bias) @ weight.T; `weight` is a copy of `parameter` in the type of `x`."""
    out: torch.Tensor = _GeluLinear.apply(x, bias, weight, parameter)  # type: ignore[no-untyped-call]
    return out


class _AddNorm(torch.autograd.Function):
    """LayerNorm(residual + dropout(h + bias)). The backward pass draws the dropout again, so no mask is stored.

    Only the norm before gamma and beta is stored, in half precision: 2 bytes per value instead of 6 for h and the residual.
    """

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor,
        eps: float, drop: float, seeds: torch.Tensor, call: int, keep: bool,
    ) -> Any:  # fmt: skip
        from tunesmith.speedups.kernels.layers import add_norm_forward

        out, copy, unit, rstd = add_norm_forward(
            h, bias, residual, gamma, beta, eps=eps, drop=drop, seeds=seeds, call=call, dtype=h.dtype, keep=keep
        )
        ctx.save_for_backward(unit, gamma, rstd, seeds)
        ctx.drop, ctx.call = drop, call
        return out if copy is out else (out, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_copy: torch.Tensor | None = None) -> Any:
        from tunesmith.speedups.kernels.layers import add_norm_backward

        unit, gamma, rstd, seeds = ctx.saved_tensors
        given = d_out.contiguous(), None if d_copy is None else d_copy.contiguous()
        d_h, d_residual, sums = add_norm_backward(*given, unit, gamma, rstd, drop=ctx.drop, seeds=seeds, call=ctx.call)
        d_gamma, d_beta, d_bias = sum_rows(sums).unbind(0)
        wanted = ctx.needs_input_grad
        some = [
            d if need else None for d, need in zip((d_bias, d_gamma, d_beta), (wanted[1], *wanted[3:5]), strict=True)
        ]
        return d_h, some[0], d_residual, some[1], some[2], None, None, None, None, None


def add_norm(
    h: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, norm: nn.LayerNorm, *,
    drop: float, seeds: torch.Tensor, call: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return LayerNorm(residual + dropout(h + bias)), once in the type of the residual and once in the type of `h`.

    `seeds[call]` determines the dropout; without Triton, torch's generator does.
    """
    if h.device.type == "cuda" and has_triton():
        given = (h, bias, residual, norm.weight, norm.bias, norm.eps, drop, seeds, call)
        out = _AddNorm.apply(*given, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return (out, out) if isinstance(out, torch.Tensor) else out
    dropped = functional.dropout(h + bias.to(h.dtype), drop)
    normed = functional.layer_norm(residual + dropped, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed, normed.to(h.dtype)


class _SumNorm(torch.autograd.Function):
    """(residual + dropout(h), its LayerNorm), or only the norm. The backward pass draws the dropout again."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float,
        drop: float, seeds: torch.Tensor, call: int, dtype: torch.dtype, with_total: bool, keep: bool,
    ) -> Any:  # fmt: skip
        from tunesmith.speedups.kernels.layers import sum_norm_forward

        total, out, unit, rstd = sum_norm_forward(
            h, residual, gamma, beta, eps=eps, drop=drop, seeds=seeds, call=call, dtype=dtype, with_total=with_total, keep=keep
        )  # fmt: skip
        ctx.save_for_backward(unit, gamma, rstd, seeds)
        ctx.options = {"drop": drop, "call": call, "stored": residual.dtype, "with_beta": beta is not None}
        return (total, out) if with_total else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        from tunesmith.speedups.kernels.layers import sum_norm_backward

        unit, gamma, rstd, seeds = ctx.saved_tensors
        d_total = given[0].contiguous() if len(given) == 2 else None
        d_h, d_residual, sums = sum_norm_backward(
            d_total, given[-1].contiguous(), unit, gamma, rstd, seeds=seeds, **ctx.options
        )
        d_gamma = d_beta = None
        if any(ctx.needs_input_grad[2:4]):
            d_gamma, *rest = sum_rows(sums).unbind(0)
            d_gamma = d_gamma if ctx.needs_input_grad[2] else None
            d_beta = rest[0] if ctx.needs_input_grad[3] else None
        return d_h, d_residual, d_gamma, d_beta, None, None, None, None, None, None, None


def sum_norm(
    h: torch.Tensor, residual: torch.Tensor, norm: nn.LayerNorm, *, drop: float, seeds: torch.Tensor, call: int, last: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (residual + dropout(h) in the type of the residual, its LayerNorm in the type of `h`). With `last`: only the norm,
    twice, in the type of the residual. `seeds[call]` determines the dropout; without Triton, torch's generator does.
    """
    if h.device.type == "cuda" and has_triton():
        given = (h, residual, norm.weight, norm.bias, norm.eps, drop, seeds, call, residual.dtype if last else h.dtype)
        out = _SumNorm.apply(*given, not last, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return (out, out) if last else out
    total = residual + functional.dropout(h, drop)
    normed = functional.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return (normed, normed) if last else (total, normed.to(h.dtype))


class _GegluLinear(torch.autograd.Function):
    """dropout(GELU(values) * gates) @ weight.T. The activation is recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor, drop: float, seeds: torch.Tensor, call: int
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.kernels.layers import geglu_forward

        ctx.save_for_backward(x, weight, seeds)
        ctx.options = {"drop": drop, "call": call}
        return geglu_forward(x, seeds=seeds, **ctx.options) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.kernels.layers import geglu_backward

        x, weight, seeds = ctx.saved_tensors
        active, d_x = geglu_backward(d_out @ weight, x, seeds=seeds, **ctx.options)
        d_weight = None
        if ctx.needs_input_grad[2]:
            d_weight = weight_gradient(d_out, active)
        return d_x, None, d_weight, None, None, None


def geglu_linear(
    x: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor, *, drop: float, seeds: torch.Tensor, call: int
) -> torch.Tensor:
    """Return dropout(GELU(values) * gates) @ weight.T for x (tokens, 2 width): values, then gates.

    `weight` is a copy of `parameter`.
    """
    if x.device.type == "cuda" and has_triton():
        out: torch.Tensor = _GegluLinear.apply(x, weight, parameter, drop, seeds, call)  # type: ignore[no-untyped-call]
        return out
    value, gate = x.chunk(2, dim=-1)
    return linear(functional.dropout(functional.gelu(value) * gate, drop), weight, None, parameter)


class _Rotate(torch.autograd.Function):
    """Rotate queries and keys in place by the angles of their positions; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
        from tunesmith.speedups.kernels.layers import rotate_in_place

        rotate_in_place(packed, cos, sin, heads, back=False)
        ctx.mark_dirty(packed)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.kernels.layers import rotate_in_place

        cos, sin = ctx.saved_tensors
        d_packed = d_out.contiguous()  # only used here, so it is rotated in place
        rotate_in_place(d_packed, cos, sin, ctx.heads, back=True)
        return d_packed, None, None, None


def rotated(packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (tokens, 3, heads, size) of (tokens, 3 heads size), with queries and keys rotated by angles (tokens, size).

    `packed` may be overwritten.
    """
    size = cos.shape[1]
    if packed.device.type == "cuda" and has_triton():
        turned: torch.Tensor = _Rotate.apply(packed, cos.contiguous(), sin.contiguous(), heads)  # type: ignore[no-untyped-call]
        return turned.view(-1, 3, heads, size)
    both, values = packed.view(-1, 3, heads, size).split_with_sizes([2, 1], 1)
    exact, half = both.float(), size // 2
    swapped = torch.cat([-exact[..., half:], exact[..., :half]], -1)
    turned = exact * cos[:, None, None] + swapped * sin[:, None, None]
    return torch.cat([turned.to(packed.dtype), values], 1)


LONGEST_FUSED = 512
"""With longer rows, a step with flash attention takes 9% more time for few rows and 7% less for many."""


class _Attention(torch.autograd.Function):
    """Attention in one kernel per direction. The gradient of query, key and value is one tensor, like the input."""

    @staticmethod
    def forward(
        ctx: Any, firsts: torch.Tensor | None, packed: torch.Tensor, layout: Layout, scale: float, drop: float,
        seeds: torch.Tensor, call: int, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.kernels.attention import attention_forward

        bounds = layout.bounds if firsts is None else torch.arange(
            layout.bounds.shape[0], dtype=torch.int32, device=packed.device
        )  # fmt: skip
        q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call, "window": window}
        longest = {"longest": layout.longest, "q_longest": layout.longest if firsts is None else 1}
        out, lse = attention_forward(q, k, v, bounds, layout.bounds, **longest, **options)  # type: ignore[arg-type]
        ctx.save_for_backward(firsts, packed, bounds, layout.bounds, out, lse, seeds)
        ctx.longest, ctx.options = layout.longest, {k: v for k, v in options.items() if k != "seeds"}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.kernels.attention import attention_backward

        firsts, packed, q_bounds, k_bounds, out, lse, seeds = ctx.saved_tensors
        d_packed = torch.empty_like(packed)
        if firsts is None:
            d_firsts = None
            (q, k, v), into = packed.unbind(1), d_packed.unbind(1)
        else:
            d_firsts = torch.empty_like(firsts)
            q, (k, v), into = firsts, packed.unbind(1), (d_firsts, *d_packed.unbind(1))
        attention_backward(
            d_out.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            into,
            q_bounds,
            k_bounds,
            longest=ctx.longest,
            seeds=seeds,
            **ctx.options,
        )
        return d_firsts, d_packed, None, None, None, None, None, None


def attend_fused(
    firsts: torch.Tensor | None, packed: torch.Tensor, layout: Layout, *,
    scale: float, drop: float, seeds: torch.Tensor, call: int, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention (tokens, heads, size) of `packed`, (tokens, 3, heads, size): query, key and value of every token.

    With `firsts`, (examples, heads, size), the queries are those of first tokens, and `packed` contains keys and values.
    With `window`, a token attends to tokens at most this far away.
    """
    window = binding(window, layout)
    size = packed.shape[-1]
    if packed.device.type == "cuda" and has_triton() and layout.longest <= LONGEST_FUSED and size in (16, 32, 64, 128):
        out: torch.Tensor = _Attention.apply(firsts, packed, layout, scale, drop, seeds, call, window)  # type: ignore[no-untyped-call]
        return out
    q, k, v = packed.unbind(1) if firsts is None else (firsts, *packed.unbind(1))
    return attend_packed(q, k, v, layout, scale, drop, firsts is not None, window)


LONGEST_BY_DISTANCE = 1024
"""Examples with more tokens have more scores than a program can keep."""


class _DistanceAttention(torch.autograd.Function):
    """Relative attention. Examples are padded only inside matmuls, and padded again in the backward pass instead of stored."""

    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, as_keys: torch.Tensor | None, as_queries: torch.Tensor | None,
        bias: torch.Tensor | None, layout: Layout, scale: float, drop: float, seeds: torch.Tensor, call: int,
    ) -> torch.Tensor:  # fmt: skip
        from tunesmith.speedups.kernels.attention import gather_stretches, spread_stretches, weigh_scores

        q, k, v = spread_stretches(packed, layout.bounds, layout.longest).unbind(0)
        near = _by_distance(packed, 0, as_keys), _by_distance(packed, 1, as_queries)
        options = {"scale": scale, "drop": drop, "seeds": seeds, "call": call}
        scores = q @ k.transpose(-1, -2)
        plain, weights = weigh_scores(scores, *near, bias, layout.bounds, **options)  # type: ignore[arg-type]
        ctx.save_for_backward(packed, as_keys, as_queries, plain, weights, seeds, layout.bounds)
        ctx.options = {k: v for k, v in options.items() if k != "seeds"}
        return gather_stretches((weights @ v).unsqueeze(0), layout.bounds, packed.shape[0]).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from tunesmith.speedups.kernels.attention import gather_stretches, spread_stretches, weigh_scores_backward

        packed, as_keys, as_queries, plain, weights, seeds, bounds = ctx.saved_tensors
        tokens, longest = packed.shape[0], plain.shape[-1]
        q, k, v = spread_stretches(packed, bounds, longest).unbind(0)
        d_rows = spread_stretches(d_out.contiguous().unsqueeze(1), bounds, longest)[0]
        d_scores, d_by_key, d_by_query = weigh_scores_backward(
            d_rows @ v.transpose(-1, -2), plain, bounds, tokens,
            key=as_keys is not None, query=as_queries is not None, seeds=seeds, **ctx.options,
        )  # fmt: skip
        d_three = q.new_empty(3, *q.shape)
        torch.matmul(d_scores, k, out=d_three[0])
        torch.matmul(d_scores.transpose(-1, -2), q, out=d_three[1])
        torch.matmul(weights.transpose(-1, -2), d_rows, out=d_three[2])
        d_packed = gather_stretches(d_three, bounds, tokens)
        d_keys = _to_table(d_packed, packed, 0, as_keys, d_by_key)
        d_queries = _to_table(d_packed, packed, 1, as_queries, d_by_query)
        d_bias = d_scores.sum(1, dtype=torch.float32) / ctx.options["scale"] if ctx.needs_input_grad[3] else None
        return d_packed, d_keys, d_queries, d_bias, None, None, None, None, None


def _by_distance(packed: torch.Tensor, kind: int, table: torch.Tensor | None) -> torch.Tensor | None:
    """Return the matmul of queries (kind 0) or keys (1) with the table of distances, (heads, tokens, distances)."""
    return None if table is None else packed[:, kind].transpose(0, 1) @ table.transpose(1, 2)


def _to_table(
    d_packed: torch.Tensor, packed: torch.Tensor, kind: int, table: torch.Tensor | None, d_near: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of the table; add that of the tokens in place."""
    if table is None or d_near is None:
        return None
    d_packed[:, kind] += (d_near @ table).transpose(0, 1)
    return d_near.transpose(1, 2) @ packed[:, kind].transpose(0, 1)


def attends_fused(packed: torch.Tensor, layout: Layout) -> bool:
    """Return whether the kernels support this batch."""
    return packed.device.type == "cuda" and has_triton() and layout.longest <= LONGEST_BY_DISTANCE


def attend_by_distance(
    packed: torch.Tensor, layout: Layout, *, as_keys: torch.Tensor | None = None, as_queries: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, scale: float, drop: float, seeds: torch.Tensor, call: int,
) -> torch.Tensor:  # fmt: skip
    """Return attention (tokens, heads, size) of query, key and value of every token, (tokens, 3, heads, size).

    Scores are (q k + q as_keys + k as_queries) * scale + bias. `as_keys` is (heads, 2 longest - 1, size): row longest - 1 - i + j
    belongs to query i and key j; in `as_queries` it is row longest - 1 - j + i. `bias` is (heads, longest, longest) in float32.
    """
    out: torch.Tensor = _DistanceAttention.apply(  # type: ignore[no-untyped-call]
        packed.contiguous(), as_keys, as_queries, bias, layout, scale, drop, seeds, call
    )
    return out
