"""accelerator_config and adapters on two ranks: the same as one process, and each value's effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.accelerator_ranks import everything
from distributed.launching import TESTS, finish, start, torchrun

pytestmark = pytest.mark.slow
Results = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each of two ranks saw, by rank."""
    out = tmp_path_factory.mktemp("ranks") / "seen"
    ended = finish(start(torchrun(str(TESTS / "distributed" / "accelerator_ranks.py"), str(out))))
    assert ended.code == 0, ended.err[-3000:]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What one process saw."""
    return everything(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("case", ["plain", "split", "uneven", "dispatched", "accumulated", "each"])
def test_two_ranks_train_as_one_process_does_with(ranks: list[Results], alone: Results, case: str) -> None:
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(alone[case]["losses"], rel=1e-5)
        assert rank[case]["eval"] == pytest.approx(alone[case]["eval"], rel=1e-5)
        assert rank[case]["rows"] == alone[case]["rows"] == 8


def test_split_batches_refuses_a_batch_that_cannot_be_split(ranks: list[Results]) -> None:
    assert all("7 rows is split over 2 ranks" in rank["odd"] for rank in ranks)


def test_a_dispatched_stream_is_read_by_the_first_rank_alone(ranks: list[Results]) -> None:
    assert [rank["dispatched"]["read"] > 0 for rank in ranks] == [True, False]


def test_sync_each_batch_exchanges_gradients_in_every_micro_batch(ranks: list[Results]) -> None:
    for rank in ranks:
        assert rank["accumulated"]["exchanged"][:4] == [False, True, False, True]
        assert set(rank["each"]["exchanged"]) == {True}


def test_adapters_train_and_resume_on_two_ranks_as_in_one_process(ranks: list[Results], alone: Results) -> None:
    for rank in ranks:
        assert rank["adapters"]["losses"] == pytest.approx(alone["adapters"]["losses"], abs=2e-5)
        assert rank["adapters"]["exact"]
        assert rank["adapters"]["files"] == alone["adapters"]["files"]
