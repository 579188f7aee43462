"""The Trainer's loaders and logs on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.launching import TESTS, finish, start, torchrun
from distributed.loader_ranks import LENGTHS

pytestmark = pytest.mark.slow
Results = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each of two ranks saw, by rank."""
    out = tmp_path_factory.mktemp("loaders") / "seen"
    ended = finish(start(torchrun(str(TESTS / "distributed" / "loader_ranks.py"), str(out))))
    assert ended.code == 0, ended.err[-3000:]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_that_are_no_dicts_are_evaluated_and_predicted_once_and_in_order(
    ranks: list[Results], length: int
) -> None:
    assert [rank[str(length)] for rank in ranks] == [[[True, True], [True, True]]] * 2


def test_workers_of_two_ranks_draw_different_numbers(ranks: list[Results]) -> None:
    shown = [np.asarray(rank["shown"]) for rank in ranks]
    assert [s.shape for s in shown] == [(3, 8, 3)] * 2
    for column in range(3):
        assert not np.isin(shown[0][..., column], shown[1][..., column]).any()
        assert len(np.unique(shown[0][..., column])) == 24, "nor do two workers of one rank"


def test_log_level_and_log_level_replica_decide_which_rank_announces_a_run(ranks: list[Results]) -> None:
    assert [rank["said"] for rank in ranks] == [
        {"info": 1, "both": 1, "replica": 0, "nobody": 0},
        {"info": 0, "both": 1, "replica": 1, "nobody": 0},
    ]
