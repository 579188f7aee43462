"""GPU kernels without a GPU: they match torch in triton's interpreter and compile to machine code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(script: str, *words: str, cache: Path, **environment: str) -> list[list[str]]:
    """Run a script and return the words of each line of its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script), *words],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_interpreted_kernels_match_torch(tmp_path: Path) -> None:
    lines = run("interpreted.py", cache=tmp_path, TRITON_INTERPRET="1")
    assert len(lines) == 125
    wrong = [line for line in lines if not float(line[1]) <= float(line[2])]
    assert wrong == []


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_every_kernel_compiles_for_the_gpu(capability: int, tmp_path: Path) -> None:
    lines = run("compiled.py", str(capability), cache=tmp_path)
    assert len(lines) == 25
    assert all(int(size) > 1000 for _, size in lines)
