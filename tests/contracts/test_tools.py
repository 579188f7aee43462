"""Formatted, linted and strictly typed: `make test` says so, not only `make lint`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [("ruff", "format", "--check", "src", "tests", "bench"), ("ruff", "check", "src", "tests", "bench"), ("mypy",)],
    ids=["format", "lint", "types"],
)
def test_the_tool_has_nothing_to_say(words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
