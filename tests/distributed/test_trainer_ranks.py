"""The Trainer on two ranks equals transformers' Trainer; its loaders and logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.launching import TESTS, finish, start, torchrun
from distributed.trainer_ranks import EVALUATED, LENGTHS, dataset

pytestmark = pytest.mark.slow
Results = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[Results]:
    """Return the results of two ranks."""
    out = place / "seen"
    ended = finish(start(torchrun(str(TESTS / "distributed" / "trainer_ranks.py"), str(out))))
    assert ended.code == 0, ended.err[-3000:]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_equal_transformers(ranks: list[Results]) -> None:
    ours, oracle = ranks[0]["ddp"], ranks[0]["ddp oracle"]
    assert ours["steps"] == oracle["steps"] == 9
    assert ours["best"] == oracle["best"]
    for name in ("losses", "eval_losses"):
        np.testing.assert_allclose(ours[name], oracle[name], atol=1e-5, rtol=0, err_msg=name)
    np.testing.assert_allclose(ours["norms"], oracle["norms"], rtol=1e-3)


def test_predictions_on_two_ranks_are_complete_and_in_order(ranks: list[Results]) -> None:
    expected = dataset(EVALUATED, seed=9)["labels"]
    for rank in ranks:
        assert np.shape(rank["ddp"]["predictions"]) == (EVALUATED, 2)
        assert rank["ddp"]["labels"] == list(expected)
        np.testing.assert_allclose(rank["ddp"]["predictions"], rank["ddp oracle"]["predictions"], atol=1e-4)


def test_resume_on_two_ranks_is_bit_identical(ranks: list[Results]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["ddp"]["losses"][4:]


@pytest.mark.parametrize("length", LENGTHS)
def test_non_dict_examples_are_predicted_in_order(ranks: list[Results], length: int) -> None:
    assert [rank[str(length)] for rank in ranks] == [[[True, True], [True, True]]] * 2


def test_workers_of_two_ranks_draw_different_numbers(ranks: list[Results]) -> None:
    shown = [np.asarray(rank["shown"]) for rank in ranks]
    assert [s.shape for s in shown] == [(3, 8, 3)] * 2
    for column in range(3):
        assert not np.isin(shown[0][..., column], shown[1][..., column]).any()
        assert len(np.unique(shown[0][..., column])) == 24, "two workers of one rank differ, too"


def test_log_levels_decide_which_rank_logs(ranks: list[Results]) -> None:
    assert [rank["said"] for rank in ranks] == [
        {"info": 1, "both": 1, "replica": 0, "nobody": 0},
        {"info": 0, "both": 1, "replica": 1, "nobody": 0},
    ]
