"""The order of an epoch: every row once, a pure function of (seed, epoch), similar lengths together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data.tokens import epoch_order
from tunesmith.errors import ConfigError

LENGTHS = np.random.default_rng(0).integers(5, 120, 1003)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    per_step=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
    sampling=st.sampled_from(["random", "sequential", "group_by_length"]),
    budget=st.one_of(st.none(), st.integers(1, 500)),
)
def test_every_row_occurs_exactly_once(
    rows: int, per_step: int, seed: int, epoch: int, sampling: Any, budget: Any
) -> None:
    order = epoch_order(
        rows, seed=seed, epoch=epoch, rows_per_step=per_step, sampling=sampling, lengths=LENGTHS, token_budget=budget
    )
    assert sorted(order.rows.tolist()) == list(range(rows))
    windows = [order.window(i) for i in range(len(order))]
    assert sum(len(w) for w in windows) == rows
    assert all(len(w) for w in windows)
    if budget is None:
        assert [len(w) for w in windows[:-1]] == [per_step] * (len(windows) - 1)
    else:
        assert all(len(w) == 1 or LENGTHS[w].sum() <= budget for w in windows)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(sampling: Any) -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        np.random.seed(None)
        order = epoch_order(1003, seed=seed, epoch=epoch, rows_per_step=8, sampling=sampling, lengths=LENGTHS)
        return [int(r) for r in order.rows]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1)
    assert rows(1, 0) != rows(2, 0)


def test_length_grouping_leaves_hardly_any_padding() -> None:
    def padded(sampling: Any) -> float:
        order = epoch_order(1003, seed=3, epoch=0, rows_per_step=8, sampling=sampling, lengths=LENGTHS)
        windows = [LENGTHS[order.window(i)] for i in range(len(order))]
        return float(sum(w.max() * len(w) for w in windows) / LENGTHS.sum())

    assert padded("random") > 1.5
    assert padded("group_by_length") < 1.06


def test_grouping_keeps_a_window_the_same_whatever_the_accumulation_and_only_the_last_is_ragged() -> None:
    order = epoch_order(1003, seed=3, epoch=2, rows_per_step=8, sampling="group_by_length", lengths=LENGTHS)
    sizes = [len(order.window(i)) for i in range(len(order))]
    assert sizes == [8] * 125 + [3]


def test_drop_last_leaves_the_ragged_tail_out() -> None:
    order = epoch_order(20, seed=0, epoch=0, rows_per_step=8, drop_last=True)
    assert [len(order.window(i)) for i in range(len(order))] == [8, 8]


def test_grouping_without_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="length of every row"):
        epoch_order(10, seed=0, epoch=0, rows_per_step=2, sampling="group_by_length")


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_rows_left_out_by_drop_last_are_others_in_each_epoch_whatever_their_length(sampling: Any) -> None:
    def left_out(epoch: int) -> set[int]:
        order = epoch_order(
            103, seed=7, epoch=epoch, rows_per_step=16, sampling=sampling, lengths=LENGTHS, drop_last=True
        )
        assert [len(order.window(i)) for i in range(len(order))] == [16] * 6
        seen = {int(row) for i in range(len(order)) for row in order.window(i)}
        assert len(seen) == 96
        return set(range(103)) - seen

    epochs = [left_out(epoch) for epoch in range(40)]
    assert epochs[3] == left_out(3), "a pure function of seed and epoch"
    assert len(set().union(*epochs)) > 80, "sooner or later it is every row's turn"
    shortest = set(np.argsort(LENGTHS[:103], kind="stable")[:7].tolist())
    assert sum(len(out & shortest) for out in epochs) < 60, "17 to be expected of 280"
