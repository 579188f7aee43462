"""Python's, NumPy's and torch's random generators as tensors and JSON, and back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators: for user code, as the engine's own dropout needs none of them."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    plain = {"numpy": [kind, int(position), int(has_gauss), float(cached)], "python": [version, list(numbers), gauss]}
    return {"tensors": tensors, "plain": plain}


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Whatever is drawn inside, the generators of the CPU are afterwards as they were."""
    found = generator_states(torch.device("cpu"))
    try:
        yield
    finally:
        restore_generators({f"{k}.0": v for k, v in found["tensors"].items()}, found["plain"], 0, torch.device("cpu"))


def restore_generators(
    tensors: dict[str, torch.Tensor], plain: dict[str, Any], rank: int, device: torch.device
) -> None:
    """Puts the generators of one rank back as `generator_states` found them."""
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, tensors[f"numpy.{rank}"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors[f"torch.{rank}"])
    if device.type == "cuda" and f"cuda.{rank}" in tensors:
        torch.cuda.set_rng_state(tensors[f"cuda.{rank}"], device)
