"""Tiny models take the parts for the CPU that only larger ones would take by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tunesmith.speedups import cpu_speed


@pytest.fixture(autouse=True, scope="module")
def _parts_of_any_size() -> Iterator[None]:
    """For runs that a module shares as well."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_ENOUGH_PRODUCTS", "_ENOUGH_VALUES", "_LARGE_TABLE"):
            patched.setattr(cpu_speed, name, 0)
        yield
