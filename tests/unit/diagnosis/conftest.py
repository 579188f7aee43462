"""The synthetic runs of tests/synthetic_runs.py, as a fixture."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def synthetic() -> SimpleNamespace:
    """`make_run` and `CONFIG`."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "synthetic_runs.py")))
