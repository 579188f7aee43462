"""Seeds. Dropout of a step depends on (seed, step, rank) alone, so a resumed step repeats without saved generator state."""

from __future__ import annotations

import random

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


def seed_step(seed: int, step: int, rank: int) -> None:
    """Sets torch's generators for the dropout of one optimizer step."""
    torch.manual_seed(step_seed(seed, step, rank))


def make_deterministic() -> None:
    """Only deterministic kernels, as `full_determinism` asks; torch raises where there is none."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
