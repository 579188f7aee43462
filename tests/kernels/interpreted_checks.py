"""What the interpreted checks of kernels share: their seeds, and how a line is printed."""

from __future__ import annotations

import torch

SEEDS = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(5))


def say(name: str, found: float, limit: float) -> None:
    """One line for the test that reads it."""
    print(f"{name.replace(' ', '_')} {found:.6g} {limit:.6g}", flush=True)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference."""
    return float((one.detach().float() - other.detach().float()).abs().max())
