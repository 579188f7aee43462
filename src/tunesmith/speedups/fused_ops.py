"""The pieces of an encoder layer with as few passes over memory as they need; triton where it is, torch elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tunesmith.models.families import is_hooked
from tunesmith.training.distributed import has_triton


def weight_gradient(d_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """d_out.T @ x in float32: half-precision factors, and no rounding of their sum."""
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return (d_out.t() @ x).float()
    return torch.mm(d_out.t(), x, out_dtype=torch.float32)


class _Ones:
    """Vectors of ones that stay where they are: captured steps still read the shorter ones after a longer was made."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def __call__(self, count: int, like: torch.Tensor) -> torch.Tensor:
        kept = self._kept.setdefault((like.device, like.dtype), [])
        if not kept or kept[-1].shape[0] < count:
            kept.append(torch.ones(max(4096, 2 * count), dtype=like.dtype, device=like.device))
        return kept[-1][:count]


ones = _Ones()


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """The float32 sum over the first dimension. As a product with ones it takes half the time of torch's sum on a GPU."""
    if x.device.type != "cuda":
        return x.sum(0, dtype=torch.float32)
    flat = x.reshape(x.shape[0], -1)
    if x.dtype == torch.float32:  # gemv never rounds to TF32
        return torch.mv(flat.t(), ones(x.shape[0], x)).view(x.shape[1:])
    return torch.mm(ones(x.shape[0], x).unsqueeze(0), flat, out_dtype=torch.float32).view(x.shape[1:])


def nobody_looks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the gradients of these parameters are first looked at after the backward pass.

    Hooks see them earlier, DDP's among them, and a second micro-batch adds to those of the first.
    """
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return False
    return not any(p.grad is not None or is_hooked(p) for p in parameters)


class SideStream:
    """Gradients of weights on a second stream: nothing waits for them before the update, and small products leave room.

    Not for batches of any size: memory that the second stream reads is not used again before it is done.
    """

    MOST_TOKENS = 16384
    """On an H200 3% of a step of BERT-base at 64 rows and up to 2% at 256 (13,824 tokens), with the same bits (0122)."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._joined: dict[torch.device, int] = {}

    @contextmanager
    def after(self, *inputs: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, kernels run beside those that follow, once the inputs are there."""
        device = inputs[0].device
        if device.type != "cuda" or inputs[0].shape[0] > self.MOST_TOKENS or not nobody_looks(parameters):
            yield
            return
        side = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        backward = torch._C._current_graph_task_id()
        if self._joined.get(device) != backward:  # by its number: one that broke off never came to its end
            self._joined[device] = backward
            # At the end of any backward pass: the gradients are there for all that follows.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._join(device))
        for tensor in inputs:
            tensor.record_stream(side)
        with torch.cuda.stream(side):
            yield

    def _join(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_stream(self._streams[device])


side_stream = SideStream()


class _CopiedLinear(torch.autograd.Function):
    """x @ weight.T (+ bias) through copies in the type of `x`; gradients go to the parameters they are copies of."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters = parameters
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
        with side_stream.after(d_out, x, parameters=ctx.parameters):
            if any(wanted[3 : 3 + count]):
                grads[:count] = weight_gradient(d_out, x).split_with_sizes(ctx.sizes)
            if ctx.with_bias and any(wanted[3 + count :]):
                grads[count:] = sum_rows(d_out).split_with_sizes(ctx.sizes)
        d_x = d_out @ weight if wanted[0] else None
        return (d_x, None, None, *(g if need else None for g, need in zip(grads, wanted[3:], strict=True)))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *parameters: torch.Tensor) -> torch.Tensor:
    """x @ weight.T + bias; `parameters` are the weights, then the biases, that the two are made of, in order."""
    out: torch.Tensor = _CopiedLinear.apply(x, weight, bias, *parameters)  # type: ignore[no-untyped-call]
    return out


class _GeluLinear(torch.autograd.Function):
    """GELU(x + bias) @ weight.T. The activation is computed again for the backward pass: half the memory of the layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.parameter = parameter
        if x.device.type == "cuda" and has_triton():
            from tunesmith.speedups.triton_kernels import bias_gelu_forward

            return bias_gelu_forward(x, bias) @ weight.t()
        return functional.gelu(x + bias.to(x.dtype)) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, bias, weight = ctx.saved_tensors
        d_active = d_out @ weight
        if x.device.type == "cuda" and has_triton():
            from tunesmith.speedups.triton_kernels import bias_gelu_backward

            active, d_x, sums = bias_gelu_backward(d_active, x, bias)
        else:
            value = x + bias.to(x.dtype)
            active = functional.gelu(value)
            d_x = sums = torch.ops.aten.gelu_backward(d_active, value)
        _, bias_too, _, weight_too = ctx.needs_input_grad
        with side_stream.after(d_out, active, sums, parameters=(bias, ctx.parameter)):
            d_bias = sum_rows(sums) if bias_too else None
            d_weight = weight_gradient(d_out, active) if weight_too else None
        return d_x, d_bias, None, d_weight


def gelu_linear(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias) @ weight.T; `weight` is a copy of `parameter` in the type of `x`."""
    out: torch.Tensor = _GeluLinear.apply(x, bias, weight, parameter)  # type: ignore[no-untyped-call]
    return out


class _AddNorm(torch.autograd.Function):
    """LayerNorm(residual + dropout(h + bias)), dropout drawn again in the backward pass: no mask is kept.

    What is kept is the norm before gamma and beta, in half precision: 2 bytes a value instead of 6 for h and the residual.
    """

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor,
        eps: float, drop: float, seeds: torch.Tensor, call: int, keep: bool,
    ) -> Any:  # fmt: skip
        from tunesmith.speedups.triton_kernels import add_norm_forward

        out, copy, unit, rstd = add_norm_forward(
            h, bias, residual, gamma, beta, eps=eps, drop=drop, seeds=seeds, call=call, dtype=h.dtype, keep=keep
        )
        ctx.save_for_backward(unit, gamma, rstd, seeds)
        ctx.drop, ctx.call = drop, call
        ctx.parameters = (bias, gamma, beta)
        return out if copy is out else (out, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_copy: torch.Tensor | None = None) -> Any:
        from tunesmith.speedups.triton_kernels import add_norm_backward

        unit, gamma, rstd, seeds = ctx.saved_tensors
        given = d_out.contiguous(), None if d_copy is None else d_copy.contiguous()
        d_h, d_residual, sums = add_norm_backward(*given, unit, gamma, rstd, drop=ctx.drop, seeds=seeds, call=ctx.call)
        with side_stream.after(sums, parameters=ctx.parameters):
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
    """LayerNorm(residual + dropout(h + bias)): as the residual is stored, and in the type of `h`.

    `seeds[call]` says which values are dropped; where triton is missing torch's generator does.
    """
    if h.device.type == "cuda" and has_triton():
        given = (h, bias, residual, norm.weight, norm.bias, norm.eps, drop, seeds, call)
        out = _AddNorm.apply(*given, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return (out, out) if isinstance(out, torch.Tensor) else out
    dropped = functional.dropout(h + bias.to(h.dtype), drop)
    normed = functional.layer_norm(residual + dropped, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed, normed.to(h.dtype)
