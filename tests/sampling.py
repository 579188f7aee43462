"""Choose the cases of a test matrix that `make test` runs; `make long` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations; mark those not needed to cover each value once as `long`.

    A tuple stands for several arguments.
    """
    lists = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in axes]
    shown = {tuple(i % len(axis) for axis in lists) for i in range(max(map(len, lists)))}
    cases = []
    for at in itertools.product(*(range(len(axis)) for axis in lists)):
        values = itertools.chain(*(axis[i] for axis, i in zip(lists, at, strict=True)))
        cases.append(pytest.param(*values, marks=() if at in shown else pytest.mark.long))
    return cases
