"""Random numbers: what they are seeded with, and generators as tensors and JSON, and back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (all devices), as transformers' `set_seed` does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def step_seed(seed: int, step: int, rank: int) -> int:
    """63 well-mixed bits from (seed, step, rank)."""
    return int(np.random.SeedSequence([seed & (2**63 - 1), step, rank]).generate_state(1, np.uint64)[0] >> 1)


def seed_step(seed: int, step: int, rank: int, device: torch.device | None = None) -> None:
    """Sets torch's generators for the dropout of one optimizer step: those of the CPU and of this device, or all there are."""
    number = step_seed(seed, step, rank)
    if device is None or device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    # torch.manual_seed also keeps the number for each kind of accelerator that is not in use, with the call's stack as text:
    # one to two milliseconds a step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def make_deterministic() -> None:
    """Only deterministic kernels, as `full_determinism` asks; torch raises where there is none."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


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
