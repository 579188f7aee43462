"""Ranks with ties at their mean, as scipy gives them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import rankdata

from tunesmith.metrics.intervals import mean_ranks


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 1.0, 2.0, -5.0], [0.5] * 7, [1e300, -1e300, 0.0, -0.0]])
def test_the_ranks_are_those_of_scipy(values: list[float]) -> None:
    assert mean_ranks(np.array(values)) == pytest.approx(rankdata(values))
    drawn = np.random.default_rng(len(values)).integers(0, 9, 200)
    assert mean_ranks(drawn) == pytest.approx(rankdata(drawn))
