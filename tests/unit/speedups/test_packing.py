"""Packed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tunesmith.speedups.packing import FILLER, Layout, pack

ROWS = {
    "input_ids": [np.array([10, 11, 12]), np.array([20]), np.array([30, 31])],
    "token_type_ids": [np.array([0, 0, 1]), np.array([0]), np.array([0, 1])],
}


def layout_of(batch: dict[str, torch.Tensor | Layout]) -> Layout:
    layout = batch["layout"]
    assert isinstance(layout, Layout)
    return layout


def test_tokens_lie_one_row_after_the_other_sorted_by_length() -> None:
    batch = pack(ROWS)
    assert batch["input_ids"].tolist() == [[20, 30, 31, 10, 11, 12]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 0, 1, 2]]
    layout = layout_of(batch)
    assert layout.lengths == (1, 2, 3)
    assert layout.longest == 3
    assert layout.bounds.tolist() == [0, 1, 3, 6]
    assert layout.bounds.dtype == torch.int32


def test_order_leads_from_the_rows_given_to_their_first_tokens() -> None:
    batch = pack(ROWS)
    layout = layout_of(batch)
    firsts = batch["input_ids"][0, layout.starts[layout.order]]
    assert firsts.tolist() == [10, 20, 30]


def test_positions_start_where_the_family_starts_them() -> None:
    assert pack(ROWS, first_position=2)["position_ids"].tolist() == [[2, 2, 3, 2, 3, 4]]


def test_only_the_inputs_the_model_takes_are_made() -> None:
    assert "token_type_ids" not in pack(ROWS, keys=("input_ids",))


def test_filling_is_a_stretch_of_its_own() -> None:
    for total in (7, 9):
        batch = pack(ROWS, total=total, longest=4, first_position=2)
        layout = layout_of(batch)
        assert batch["input_ids"].shape == batch["position_ids"].shape == (1, total)
        assert layout.lengths == (1, 2, 3, total - 6)
        assert layout.starts.tolist() == [0, 1, 3, 6]
        assert layout.longest == 4
        assert batch["input_ids"][0, 6:].tolist() == [FILLER] * (total - 6)
        assert batch["position_ids"][0, 6:].tolist() == [2] * (total - 6)


def test_a_batch_that_does_not_fit_its_bucket_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        pack(ROWS, total=6)
    with pytest.raises(AssertionError, match="longer than longest"):
        pack(ROWS, total=20, longest=4)
    with pytest.raises(AssertionError, match="without tokens"):
        pack({"input_ids": [np.array([], dtype=np.int64), np.array([1])]})
    with pytest.raises(AssertionError, match="without tokens"):
        pack({"input_ids": []})


def test_a_layout_moves_with_its_numbers() -> None:
    layout = layout_of(pack(ROWS))
    moved = layout.to("cpu")
    assert moved.lengths == layout.lengths
    assert torch.equal(moved.bounds, layout.bounds)
