"""Two ranks of 4 rows compute what one rank of 8 rows computes; every decision is the same on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.engine_ranks import CASES, evaluate_rows, run_case
from distributed.launching import TESTS, finish, start, torchrun
from tunesmith.training.distributed import make_runtime

pytestmark = pytest.mark.slow
Results = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Return the results of two ranks, from one launch for all cases, because starting torch takes longest."""
    out = tmp_path_factory.mktemp("ranks") / "seen"
    ended = finish(start(torchrun(str(TESTS / "distributed" / "engine_ranks.py"), str(out))))
    assert ended.code == 0, ended.err[-3000:]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_four_equal_one_rank_of_eight(ranks: list[Results], case: str) -> None:
    alone = run_case(make_runtime(use_cpu=True), **CASES[case])
    both = ranks[0][case]
    assert both["step"] == alone["step"]
    assert len(alone["losses"]) >= 4
    # A warm optimizer divides by the root of tiny second moments, so rounding errors grow with the number of steps.
    tolerance = 1e-6 if case != "early stopping" else 1e-3
    np.testing.assert_allclose(both["losses"], alone["losses"], atol=tolerance, rtol=0)
    np.testing.assert_allclose(both["norms"], alone["norms"], atol=10 * tolerance, rtol=1e-4)
    for name, value in alone["weights"].items():
        assert both["weights"][name] == pytest.approx(value, abs=2e-3 if tolerance < 1e-3 else 1.0), name


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_weights_and_decisions(ranks: list[Results], case: str) -> None:
    first, second = ranks[0][case], ranks[1][case]
    assert first == second


def test_early_stopping_happens_on_both_ranks_at_one_step(ranks: list[Results]) -> None:
    stopped = [r["early stopping"] for r in ranks]
    assert stopped[0]["step"] == stopped[1]["step"] < stopped[0]["planned"]
    assert stopped[0]["progress"] == stopped[1]["progress"]


def test_repeated_run_is_bit_identical(ranks: list[Results]) -> None:
    assert ranks[0]["again"] == ranks[0]["all strategies and accumulation"]


def test_evaluation_gathers_every_row_once_in_order(ranks: list[Results]) -> None:
    alone = evaluate_rows(make_runtime(use_cpu=True))
    for count, expected in alone.items():
        for rank in ranks:
            found = rank["evaluation"][count]
            assert found["seen"] == int(count)
            np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-6)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_different_seeds_are_refused_on_every_rank(ranks: list[Results]) -> None:
    for rank in ranks:
        line = rank["disagree"]
        assert "the ranks were started with different settings" in line
        assert "seed is 3 on rank 0 and 4 on rank 1" in line
