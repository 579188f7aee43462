"""Tests for a CUDA device: `python -m pytest tests/gpu` there. They need scratch/tokens, made by bench/common.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
TOKENS = HERE.parents[1] / "scratch" / "tokens" / "mrpc.npz"
sys.path += [
    str(HERE),
    str(HERE.parents[1] / "src"),
    str(HERE.parents[1] / "bench"),
]  # after tests, which has a conftest, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests with the reason if they cannot run."""
    reason = None if torch.cuda.is_available() else "no CUDA device"
    if reason is None and not TOKENS.is_file():
        reason = "no scratch/tokens: run bench/common.py"
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Compute float32 matmuls in float32, not TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def rows() -> Any:
    """Return the training examples of MRPC."""
    from gpu_engine import engine_rows

    return engine_rows("mrpc", "train")
