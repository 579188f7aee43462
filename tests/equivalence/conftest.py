"""Tiny models take the parts for the CPU that only larger ones would take by themselves."""

from __future__ import annotations

import pytest

from tunesmith.fast import cpu_speed


@pytest.fixture(autouse=True)
def _parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENOUGH_PRODUCTS", "_ENOUGH_VALUES", "_LARGE_TABLE"):
        monkeypatch.setattr(cpu_speed, name, 0)
