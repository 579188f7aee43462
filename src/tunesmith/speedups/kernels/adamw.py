"""AdamW over all parameters of all groups in one Triton kernel, which also writes the half-precision copies of weights.

It computes the update of `torch.optim.AdamW` on the same state. Compared with torch's fused kernel it saves three passes over
memory: the divided gradient is not written back, and weights are not read again to be copied.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.optim import Optimizer

from tunesmith.speedups.cuda_graphs import MOST, STEP_HOOKS

_CHUNK = 8192
_BLOCK = 1024


@triton.jit
def _advance(tensors, settings, skip, scalars):
    """Count the step of one tensor and compute the factors of its update, in float64."""
    number = tl.program_id(0)
    entry = tensors + 7 * number
    place = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
    step = tl.load(place) + (1.0 - tl.load(skip).to(tl.float32))
    tl.store(place, step)
    lr = tl.load(tl.load(entry + 6).to(tl.pointer_type(tl.float32))).to(tl.float64)
    mine = settings + 3 * number
    correction1 = 1.0 - tl.exp(step.to(tl.float64) * tl.load(mine))
    correction2 = 1.0 - tl.exp(step.to(tl.float64) * tl.load(mine + 1))
    tl.store(scalars + 3 * number, (lr / correction1).to(tl.float32))
    tl.store(scalars + 3 * number + 1, tl.sqrt(correction2.to(tl.float32)))
    tl.store(scalars + 3 * number + 2, (lr * tl.load(mine + 2)).to(tl.float32))


@triton.jit
def _update(
    chunks, tensors, gradients, scalars, factors, divisor, skip,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0.0:
        return
    number = tl.load(chunks + 2 * tl.program_id(0))
    offset = tl.load(chunks + 2 * tl.program_id(0) + 1)
    entry = tensors + 7 * number
    size = tl.load(entry)
    weight = tl.multiple_of(tl.load(entry + 1), 16).to(tl.pointer_type(tl.float32))
    mean = tl.multiple_of(tl.load(entry + 2), 16).to(tl.pointer_type(tl.float32))
    square = tl.multiple_of(tl.load(entry + 3), 16).to(tl.pointer_type(tl.float32))
    copy = tl.load(entry + 4)
    gradient = tl.multiple_of(tl.load(gradients + number), 16).to(tl.pointer_type(tl.float32))
    rate = tl.load(scalars + 3 * number)
    correction2 = tl.load(scalars + 3 * number + 1)
    shrink = tl.load(scalars + 3 * number + 2)
    beta2 = tl.load(factors + 4 * number)
    rest1 = tl.load(factors + 4 * number + 1)
    rest2 = tl.load(factors + 4 * number + 2)
    eps = tl.load(factors + 4 * number + 3)
    undo = (1.0 / tl.load(divisor)).to(tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = offset + start + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, mask=inside, other=0.0) * undo
        p = tl.load(weight + at, mask=inside, other=0.0)
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        p -= shrink * p
        m += rest1 * (g - m)
        v = beta2 * v + rest2 * g * g
        p -= rate * m / (tl.sqrt(v) / correction2 + eps)
        tl.store(weight + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        if copy != 0:
            tl.store(tl.multiple_of(copy, 16).to(tl.pointer_type(HALF)) + at, p, mask=inside)


@dataclass(frozen=True)
class _Tables:
    """The tables that the kernels read: the address of every piece of every tensor, and the settings of its group."""

    chunks: torch.Tensor
    tensors: torch.Tensor
    settings: torch.Tensor
    factors: torch.Tensor
    scalars: torch.Tensor


class OneKernelAdamW:
    """Updates the parameters of a `torch.optim.AdamW` and their copies in place.

    Learning rates are read from the device; a number, or a tensor of a different type, is copied there in every step.
    """

    def __init__(self, optimizer: Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._rates: dict[int, torch.Tensor] = {}
        self._tables: dict[Hashable, _Tables] = {}
        self._pinned: torch.Tensor | None = None
        self._used = 0

    def step(self, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Run one step with gradients / divisor, unless `skip` is 1.0. Doesn't synchronize."""
        vars(self._optimizer)["_opt_called"] = True  # what torch's schedulers look for
        given = [
            (number, group, p)
            for number, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
            if p.grad is not None
        ]
        if not given:
            return
        tables, gradients = self._table(given), self._addresses([p for _, _, p in given])
        _advance[(len(given),)](tables.tensors, tables.settings, skip, tables.scalars, num_warps=1)
        _update[(tables.chunks.shape[0],)](
            tables.chunks, tables.tensors, gradients, tables.scalars, tables.factors, divisor, skip,
            CHUNK=_CHUNK, BLOCK=_BLOCK, HALF=self._half(), num_warps=4,
        )  # fmt: skip

    @property
    def is_watched(self) -> bool:
        """Return whether a hook or a wrapper needs the optimizer's own `step`."""
        return any(getattr(self._optimizer, n, None) for n in STEP_HOOKS)

    def _rate(self, number: int, group: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) and rate.dtype == torch.float32 and rate.device == like.device:
            return rate
        if number not in self._rates:
            self._rates[number] = torch.zeros((), device=like.device)
        place = self._rates[number]
        return place.copy_(rate) if isinstance(rate, torch.Tensor) else place.fill_(rate)

    def _half(self) -> Any:
        some = next(iter(self._copies.values()), None)
        return tl.float16 if some is not None and some.dtype == torch.float16 else tl.bfloat16

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _table(self, given: list[tuple[int, dict[str, Any], torch.Tensor]]) -> _Tables:
        """Return the tables, made again if a tensor has moved."""
        rates: dict[int, int] = {}
        lines, settings, factors = [], [], []
        for number, group, p in given:
            if number not in rates:
                rates[number] = self._rate(number, group, p).data_ptr()
            state, copy = self._state_of(p), self._copies.get(p)
            places = [t.data_ptr() for t in (p, state["exp_avg"], state["exp_avg_sq"])]
            half = 0 if copy is None else copy.data_ptr()
            lines.append((p.numel(), *places, half, state["step"].data_ptr(), rates[number]))
            (beta1, beta2) = group["betas"]
            settings.append((math.log(beta1), math.log(beta2), group["weight_decay"]))
            factors.append((beta2, 1 - beta1, 1 - beta2, group["eps"]))
        key = (*lines, *settings, *factors)
        if key not in self._tables:  # none is ever dropped: CUDA graphs read them at their address
            device = given[0][2].device
            chunks = [(i, at) for i, line in enumerate(lines) for at in range(0, line[0], _CHUNK)]
            self._tables[key] = _Tables(
                torch.tensor(chunks, device=device), torch.tensor(lines, device=device),
                torch.tensor(settings, dtype=torch.float64, device=device), torch.tensor(factors, device=device),
                torch.zeros(len(lines), 3, device=device),
            )  # fmt: skip
        return self._tables[key]

    def _addresses(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """Return the addresses of the gradients. They differ in each CUDA graph, so they are copied in the stream."""
        device = parameters[0].device
        for p in parameters:
            assert p.grad is not None
            if not p.grad.is_contiguous() or p.grad.data_ptr() % 16:  # the kernel reads four values at a time
                p.grad = p.grad.clone(memory_format=torch.contiguous_format)
        addresses = torch.tensor([p.grad.data_ptr() for p in parameters if p.grad is not None], dtype=torch.int64)
        if device.type != "cuda":  # triton's interpreter, in tests
            return addresses
        if not torch.cuda.is_current_stream_capturing():
            self._reserve()
            return addresses.to(device, non_blocking=True)  # pageable memory is staged immediately, without a wait
        assert self._pinned is not None, "a step is captured before one has run"
        place = self._pinned[self._used : self._used + len(addresses)]
        self._used += len(addresses)
        place.copy_(addresses)
        return place.to(device, non_blocking=True)

    def _reserve(self) -> None:
        """Reserve pinned memory for all captures: it can't be allocated during a capture, and replays read it again."""
        if self._pinned is None:
            count = sum(len(group["params"]) for group in self._optimizer.param_groups)
            self._pinned = _take_pinned(MOST * count, self)


_PINNED: list[tuple[torch.Tensor, weakref.ref[OneKernelAdamW]]] = []
"""Pinned memory that captures have read, with its owner. It is never freed: torch would record an event on the stream of
captures, and if another capture runs there at that moment, every later query of the event fails.
"""


def _take_pinned(size: int, owner: OneKernelAdamW) -> torch.Tensor:
    for number, (memory, before) in enumerate(_PINNED):
        if before() is None and memory.numel() >= size:
            _PINNED[number] = memory, weakref.ref(owner)
            return memory
    _PINNED.append((torch.empty(size, dtype=torch.int64).pin_memory(), weakref.ref(owner)))
    return _PINNED[-1][0]
