"""Which cases of a matrix `make test` runs; the others are marked long and run by `make long`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations. The default run has as many as the longest axis has values: each value of each axis stands in one.

    A tuple stands for several arguments.
    """
    lists = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in axes]
    shown = {tuple(i % len(axis) for axis in lists) for i in range(max(map(len, lists)))}
    cases = []
    for at in itertools.product(*(range(len(axis)) for axis in lists)):
        values = itertools.chain(*(axis[i] for axis, i in zip(lists, at, strict=True)))
        cases.append(pytest.param(*values, marks=() if at in shown else pytest.mark.long))
    return cases
