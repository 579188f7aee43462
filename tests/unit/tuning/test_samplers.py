"""What the samplers and pruners of a search do with a score that is made up: nothing is trained."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np

from tunesmith.tuning.search import SearchPlan, TrialStore, Vary


def run_study(folder: Path, sampler: str, pruner: str, trials: int) -> tuple[Counter[int], list[float]]:
    """Where trials were ended, and how far from the best learning rate, in decades, those after the random ones are."""
    space = (Vary("learning_rate", low=1e-6, high=1e-2),)
    store = TrialStore(folder, SearchPlan(space, trials, sampler, pruner), {"search": "made up"}, seed=0)
    ended: Counter[int] = Counter()
    while (one := store.claim(trials)) is not None:
        rng = np.random.default_rng(one.number)
        final = 0.9 - 0.05 * (math.log10(one.options.get("learning_rate", 1e-5)) + 4) ** 2 + rng.normal(0, 0.01)
        values = {share: final - 0.2 * (1 - share / 100) + rng.normal(0, 0.01) for share in (25, 50, 75)}
        at = next((share for share, value in values.items() if store.report(one, share, value)), None)
        ended[at or 100] += 1
        store.tell(one, "complete" if at is None else "pruned", final if at is None else None)
        one.lock.release()
    late = [record.options["learning_rate"] for record in store.records() if record.number > 10]
    return ended, [abs(math.log10(rate) + 4) for rate in late]


def test_hyperband_halves_trials_at_a_quarter_and_at_half_of_their_steps(tmp_path: Path) -> None:
    ended, _ = run_study(tmp_path, "random", "hyperband", 25)
    assert 1 <= ended[25] <= 9
    assert ended[50] >= 1
    assert ended[75] == 0
    assert ended[100] >= 8


def test_tpe_draws_near_the_good_trials(tmp_path: Path) -> None:
    _, guided = run_study(tmp_path / "tpe", "tpe", "none", 25)
    _, blind = run_study(tmp_path / "random", "random", "none", 25)
    assert np.mean(guided) < np.mean(blind)
