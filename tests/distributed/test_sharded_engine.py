"""Two ranks that each hold a part of the model compute what one rank computes with all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.engine_ranks import CASES, evaluate, run_case
from distributed.launching import TESTS, finish, start, torchrun
from distributed.sharded_ranks import IDENTITY, SAVED_AT, SHARDED_CASES, go_on, resumed, small_state
from tunesmith.training.checkpoint import save_checkpoint
from tunesmith.training.runtime import make_runtime

pytestmark = pytest.mark.slow
Results = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `alone`, a checkpoint that one rank made after 3 steps."""
    folder = tmp_path_factory.mktemp("sharded")
    state = small_state(make_runtime(use_cpu=True))
    go_on(state, until=SAVED_AT)
    save_checkpoint(folder / "alone", state, IDENTITY)
    return folder


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[Results]:
    """What each of two ranks saw, by rank: one launch for all cases."""
    out = place / "seen"
    ended = finish(start(torchrun(str(TESTS / "distributed" / "sharded_ranks.py"), str(out))))
    assert ended.code == 0, ended.err[-3000:]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_holds_half_of_the_weights(ranks: list[Results]) -> None:
    assert [rank["part"] for rank in ranks] == [[True, 160 * 32 // 2, 160 * 32]] * 2


@pytest.mark.parametrize("case", SHARDED_CASES)
def test_two_sharded_ranks_give_the_losses_norms_and_decisions_of_one_rank(ranks: list[Results], case: str) -> None:
    alone = run_case(make_runtime(use_cpu=True), **CASES[case])
    both = ranks[0][case]
    assert both == ranks[1][case]
    tolerance = 1e-6 if case != "early stopping" else 1e-3  # as for DDP: a warm optimizer makes rounding grow
    assert both["step"] == alone["step"]
    assert [step for step, _ in both["improved"]] == [step for step, _ in alone["improved"]]
    np.testing.assert_allclose(both["losses"], alone["losses"], atol=tolerance, rtol=0)
    np.testing.assert_allclose(both["norms"], alone["norms"], atol=10 * tolerance, rtol=1e-4)
    for name, value in alone["weights"].items():
        assert both["weights"][name] == pytest.approx(value, abs=2e-3 if tolerance < 1e-3 else 1.0), name


@pytest.mark.parametrize("case", ["clipped", "clipped, not fused"])
def test_gradients_are_clipped_by_their_norm_over_all_ranks_from_the_weights_of_rank_0(
    ranks: list[Results], case: str
) -> None:
    alone = go_on(small_state(make_runtime(use_cpu=True)), max_grad_norm=0.001)
    assert min(norm for _, norm in alone) > 0.001, "every step is clipped"
    assert np.abs(np.subtract(alone, go_on(small_state(make_runtime(use_cpu=True)), max_grad_norm=0.0))).max() > 1e-4
    np.testing.assert_allclose(ranks[0][case], alone, atol=1e-5, rtol=0)
    assert ranks[0][case] == ranks[1][case]


def test_a_resume_is_bit_identical_with_dropout(ranks: list[Results]) -> None:
    for rank in ranks:
        found = rank["interrupted"]
        assert len(found["rest"]) == 5
        assert found["repeated"] == found["rest"]
        assert found["same weights"]


def test_bf16_gives_the_losses_of_copies_in_bf16_from_weights_kept_in_float32(ranks: list[Results]) -> None:
    single = go_on(small_state(make_runtime(use_cpu=True)))
    for rank in ranks:
        found = rank["bf16"]
        assert found["kept in"] == ["torch.float32"]
        # Both layouts cast the same float32 weights and add up gradients in float32, and a sum of two has one order:
        # measured difference 0. One rounding to bf16 somewhere else would show as 1e-3 (8 bits).
        np.testing.assert_allclose(found["parts"], found["copies"], atol=1e-6, rtol=0)
        assert found["evaluated"][1] == pytest.approx(found["evaluated"][0], abs=1e-6)
        differences = np.abs(np.subtract(found["parts"], single))[:, 0]
        assert 1e-5 < differences.max() < 2e-2, "bf16 was on, and is near float32"


def test_a_resume_in_bf16_is_bit_identical_with_dropout(ranks: list[Results]) -> None:
    for rank in ranks:
        found = rank["bf16"]["interrupted"]
        assert len(found["rest"]) == 5
        assert found["repeated"] == found["rest"]
        assert found["same weights"]


def test_checkpoints_go_from_sharded_ranks_to_one_rank_and_back(ranks: list[Results], place: Path) -> None:
    assert sorted(p.name for p in (place / "sharded").iterdir()) == sorted(p.name for p in (place / "alone").iterdir())
    whole = resumed(make_runtime(use_cpu=True), place / "alone")
    assert len(whole) == 5
    for found in (
        ranks[0]["whole run"],
        ranks[0]["from alone"],
        resumed(make_runtime(use_cpu=True), place / "sharded"),
    ):
        np.testing.assert_allclose(found, whole, atol=1e-5, rtol=0)


def test_a_value_that_is_not_finite_on_one_rank_is_named_on_both(ranks: list[Results]) -> None:
    expected = ["weight", "bert.encoder.layer.1.output.dense.weight", 8]
    assert [rank["not finite"] for rank in ranks] == [expected] * 2


def test_an_evaluation_before_the_first_step_sees_the_weights_of_rank_0(ranks: list[Results]) -> None:
    alone = evaluate(small_state(make_runtime(use_cpu=True)))["validation"][0]["loss"]
    assert [rank["evaluated first"] for rank in ranks] == pytest.approx([alone] * 2, abs=1e-6)


def test_a_speed_up_that_reaches_into_whole_weights_is_refused_when_asked_for(ranks: list[Results]) -> None:
    assert ranks[0]["refused"] == "--padding_free on is not possible: the weights are sharded (fsdp)"
