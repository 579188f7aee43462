from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.data.lengths import compare_padding, count_lengths, draw_histogram, padding_cost, summarize_lengths

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=200).map(lambda rows: np.array(rows, dtype=np.int32))


def test_the_summary_names_real_lengths() -> None:
    s = summarize_lengths(np.arange(1, 101, dtype=np.int32))
    assert (s.rows, s.shortest, s.mean, s.median, s.p95, s.longest) == (100, 1, 50.5, 50, 95, 100)
    one = summarize_lengths(np.array([7], dtype=np.int32))
    assert (one.shortest, one.median, one.p95, one.longest) == (7, 7, 7, 7)


@given(LENGTHS)
def test_every_row_is_in_exactly_one_bin(lengths: np.ndarray) -> None:
    bins = count_lengths(lengths)
    assert sum(b.rows for b in bins) == len(lengths)
    for b in bins:
        assert b.rows == int(((lengths >= b.low) & (lengths <= b.high)).sum())
    assert len(bins) <= 14


def test_bins_have_round_edges() -> None:
    assert [(b.low, b.high) for b in count_lengths(np.array([19, 103]))][:2] == [(16, 23), (24, 31)]


def test_the_drawing_marks_what_is_cut_and_hides_no_row() -> None:
    lengths = np.array([10] * 1000 + [35] + [90] * 20, dtype=np.int32)
    lines = draw_histogram(count_lengths(lengths), width=20, max_length=36, ascii_only=True)
    assert lines[0] == " 8 to 15  #################### 1000"
    assert lines[3] == "32 to 39  #                    1  partly cut"
    assert lines[-1].endswith("20  cut")
    assert lines[1] == "16 to 23                       0"


def test_padding_is_counted_batch_by_batch() -> None:
    lengths = np.array([3, 9, 4, 10, 5], dtype=np.int32)
    assert padding_cost(lengths, batch_size=2, sampling="sequential") == (31, 9 * 2 + 10 * 2 + 5)
    assert padding_cost(lengths, batch_size=5, sampling="random") == (31, 50)
    assert padding_cost(lengths, batch_size=1, sampling="random") == (31, 31)


def test_grouping_pads_less_than_random_order_and_that_less_than_a_fixed_length() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 500).astype(np.int32)
    fixed, random, grouped = compare_padding(lengths, batch_size=8, max_length=128)
    assert fixed.padded == 128 * 500
    assert fixed.share > random.share > grouped.share > 0
    assert random.share == pytest.approx(1 - lengths.sum() / random.padded)
    assert grouped.share < 0.05


@given(LENGTHS, st.integers(1, 32))
def test_padding_never_makes_tokens_vanish(lengths: np.ndarray, batch_size: int) -> None:
    for sampling in ("random", "group_by_length"):
        tokens, places = padding_cost(lengths, batch_size=batch_size, sampling=sampling)  # type: ignore[arg-type]
        assert tokens == lengths.sum()
        assert tokens <= places <= len(lengths) * lengths.max()
