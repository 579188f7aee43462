"""What the hardware can do at best, measured here and now: matrix products and copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HardwareLimits:
    """Floating-point operations a second in large matrix products, and bytes copied a second, of this device.

    A copied byte is read and written: the traffic is twice the copies.
    """

    matrix_rate: float
    copy_rate: float


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has finished its work; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(device: torch.device, dtype: torch.dtype, *, rounds: int = 7) -> HardwareLimits:
    """Medians over some rounds."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(1 << (29 if device.type == "cuda" else 26), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    product = _median(lambda: torch.mm(a, b), device, rounds)
    copy = _median(lambda: target.copy_(source), device, rounds)
    return HardwareLimits(2 * size**3 / product, source.numel() / copy)


def _median(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def operations_per_token(model: torch.nn.Module) -> float:
    """Forward and backward, by the usual count: 6 for each weight of a matrix that every token passes."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    return 6.0 * weights


def bytes_per_step(model: torch.nn.Module) -> float:
    """The least that a step of AdamW in float32 moves: each trained weight is read forward and backward and its gradient
    written, then the optimizer reads weight, gradient and two averages and writes three of them. 10 numbers of 4 bytes.
    """
    return 40.0 * sum(p.numel() for p in model.parameters() if p.requires_grad)
