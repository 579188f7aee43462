"""Seeds and output of the interpreted kernel checks."""

from __future__ import annotations

import torch

SEEDS = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(5))


def say(name: str, found: float, limit: float) -> None:
    """Print a line for the test to read."""
    print(f"{name.replace(' ', '_')} {found:.6g} {limit:.6g}", flush=True)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference."""
    return float((one.detach().float() - other.detach().float()).abs().max())
