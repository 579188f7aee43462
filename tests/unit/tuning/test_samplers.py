"""Values that a search samples for a synthetic score, without training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tunesmith.tuning.search import START_UP, SearchPlan, TrialStore, Vary


def test_later_trials_are_sampled_near_good_ones(tmp_path: Path) -> None:
    space = (Vary("learning_rate", low=1e-6, high=1e-2),)
    store = TrialStore(tmp_path, SearchPlan(space, 25), {"search": "made up"}, seed=0)
    pruned = 0
    while (one := store.claim(25)) is not None:
        rng = np.random.default_rng(one.number)
        final = 0.9 - 0.05 * (math.log10(one.options.get("learning_rate", 1e-5)) + 4) ** 2 + rng.normal(0, 0.01)
        behind = store.report(one, 50, final - 0.1)
        pruned += behind
        store.tell(one, "pruned" if behind else "complete", None if behind else final)
        one.lock.release()
    rates = [record.options["learning_rate"] for record in store.records()[1:]]
    decades = [abs(math.log10(rate) + 4) for rate in rates]
    assert np.mean(decades[START_UP:]) < np.mean(decades[:START_UP])
    assert 1 <= pruned <= 20
