"""AdamW over all parameters in one GPU kernel a group, with the copies that products are computed with (triton).

The update of `torch.optim.AdamW` on its own state. Against torch's fused kernel it saves three passes over memory: the
divided gradient is not written back, weights are not read again to be copied in half precision.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch.optim import Optimizer

from tunesmith.fast.fingerprint import STEP_HOOKS
from tunesmith.fast.graphs import MOST

_CHUNK = 8192
_BLOCK = 1024


@triton.jit
def _update(
    chunks, tensors, gradients, rate, divisor, skip, beta2, rest1, rest2, log_beta1, log_beta2, eps, decay,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0.0:
        return
    number = tl.load(chunks + 2 * tl.program_id(0))
    offset = tl.load(chunks + 2 * tl.program_id(0) + 1)
    entry = tensors + 6 * number
    size = tl.load(entry)
    weight = tl.multiple_of(tl.load(entry + 1), 16).to(tl.pointer_type(tl.float32))
    mean = tl.multiple_of(tl.load(entry + 2), 16).to(tl.pointer_type(tl.float32))
    square = tl.multiple_of(tl.load(entry + 3), 16).to(tl.pointer_type(tl.float32))
    copy = tl.load(entry + 4)
    step = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32))).to(tl.float64)
    gradient = tl.multiple_of(tl.load(gradients + number), 16).to(tl.pointer_type(tl.float32))
    lr = tl.load(rate)
    correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
    undo = 1.0 / tl.load(divisor)
    for start in range(0, CHUNK, BLOCK):
        at = offset + start + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, mask=inside, other=0.0) * undo
        p = tl.load(weight + at, mask=inside, other=0.0)
        m = tl.load(mean + at, mask=inside, other=0.0)
        v = tl.load(square + at, mask=inside, other=0.0)
        p -= lr * decay * p
        m += rest1 * (g - m)
        v = beta2 * v + rest2 * g * g
        p -= lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)
        tl.store(weight + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        if copy != 0:
            tl.store(tl.multiple_of(copy, 16).to(tl.pointer_type(HALF)) + at, p, mask=inside)


class OneKernelAdamW:
    """Updates the parameters of a `torch.optim.AdamW` in place, and with them their copies.

    A rate that is a number is read from the device too: `write_rates` puts it there before a captured step.
    """

    def __init__(self, optimizer: Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._rates: dict[int, torch.Tensor] = {}
        self._tables: dict[int, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = {}
        self._pinned: torch.Tensor | None = None
        self._used = 0

    def step(self, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """One step on gradients / divisor, unless `skip` is 1.0. No sync."""
        vars(self._optimizer)["_opt_called"] = True  # what torch's schedulers look for
        for number, group in enumerate(self._optimizer.param_groups):
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(number, group, parameters, divisor, skip)

    @property
    def is_watched(self) -> bool:
        """Whether a hook or a wrapper needs `step` of the optimizer itself."""
        return any(getattr(self._optimizer, n, None) for n in STEP_HOOKS)

    def write_rates(self) -> None:
        """The rates as they stand, where a captured step reads them."""
        for number, place in self._rates.items():
            place.fill_(self._optimizer.param_groups[number]["lr"])

    def _rate(self, number: int, group: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
        rate = group["lr"]
        if isinstance(rate, torch.Tensor):
            return rate
        if number not in self._rates:
            self._rates[number] = torch.zeros((), device=like.device)
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._rates[number].fill_(rate)
        return self._rates[number]

    def _update(
        self,
        number: int,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        divisor: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        states = [self._state_of(p) for p in parameters]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_sub_(
            steps, [skip.to(torch.float32)] * len(steps)
        )  # one tensor instead of a list would be read back
        chunks, tensors = self._table(number, parameters, states)
        gradients = self._addresses(parameters)
        (beta1, beta2), eps = group["betas"], group["eps"]
        _update[(chunks.shape[0],)](
            chunks, tensors, gradients, self._rate(number, group, divisor), divisor, skip,
            beta2, 1 - beta1, 1 - beta2, math.log(beta1), math.log(beta2), eps, group["weight_decay"],
            CHUNK=_CHUNK, BLOCK=_BLOCK, HALF=self._half(), num_warps=4,
        )  # fmt: skip

    def _half(self) -> Any:
        some = next(iter(self._copies.values()), None)
        return tl.float16 if some is not None and some.dtype == torch.float16 else tl.bfloat16

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _table(
        self, number: int, parameters: list[torch.Tensor], states: list[dict[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where everything lies on the device; made anew when something has moved."""
        lines = []
        for p, state in zip(parameters, states, strict=True):
            copy = self._copies.get(p)
            places = (p, state["exp_avg"], state["exp_avg_sq"])
            address = 0 if copy is None else copy.data_ptr()
            lines.append((p.numel(), *(t.data_ptr() for t in places), address, state["step"].data_ptr()))
        key = tuple(value for line in lines for value in line)
        known = self._tables.get(number)
        if known is None or known[0] != key:
            device = parameters[0].device
            chunks = [(i, at) for i, line in enumerate(lines) for at in range(0, line[0], _CHUNK)]
            known = (key, _on_device(chunks, device), _on_device(lines, device))
            self._tables[number] = known
        return known[1], known[2]

    def _addresses(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """Where the gradients lie: another place in each captured step, so copied in the stream."""
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
            return addresses.to(device, non_blocking=True)  # from pageable memory it is staged at once, without a wait
        assert self._pinned is not None, "a step is captured before one has run"
        place = self._pinned[self._used : self._used + len(addresses)]
        self._used += len(addresses)
        place.copy_(addresses)
        return place.to(device, non_blocking=True)

    def _reserve(self) -> None:
        """Pinned memory for every capture to come: none can be asked for during one, and replays read it again."""
        if self._pinned is None:
            count = sum(len(group["params"]) for group in self._optimizer.param_groups)
            self._pinned = _take_pinned(MOST * count, self)


_PINNED: list[tuple[torch.Tensor, weakref.ref[OneKernelAdamW]]] = []
"""Pinned memory that captures have read, and whose it is. It is never freed: torch would record an event on the stream of
captures, and if another capture runs there at that moment, every later question about the event is an error."""


def _take_pinned(size: int, owner: OneKernelAdamW) -> torch.Tensor:
    for number, (memory, before) in enumerate(_PINNED):
        if before() is None and memory.numel() >= size:
            _PINNED[number] = memory, weakref.ref(owner)
            return memory
    _PINNED.append((torch.empty(size, dtype=torch.int64).pin_memory(), weakref.ref(owner)))
    return _PINNED[-1][0]


def _on_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
