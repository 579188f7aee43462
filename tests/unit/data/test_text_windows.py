"""A row that is too long is read in windows: all of it when it is predicted, one of them in a training batch."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.data.tokens import MOST_WINDOWS, TextWindows, TokenRows, mean_by_row

WINDOWS = TextWindows(length=12, before=1, behind=1)
ROWS = TokenRows.from_lists({"input_ids": [[101, *range(1, 41), 102], [101, 7, 8, 102]], "labels": [1, 0]})


@pytest.mark.parametrize("tokens", range(3, 90))
def test_windows_cover_the_text_and_fit(tokens: int) -> None:
    row = np.array([101, *range(1, tokens - 1), 102])
    parts = [WINDOWS.part(row, start) for start in WINDOWS.starts(tokens)]
    assert {int(token) for part in parts for token in part} == set(row.tolist())
    assert all(len(part) <= 12 and part[0] == 101 and part[-1] == 102 for part in parts)
    assert len(parts) == max(1, -(-(tokens - 2) // 10))
    assert WINDOWS.longest == MOST_WINDOWS * 10 + 2


def test_a_batch_has_one_window_of_each_row_and_it_is_drawn_anew_for_another_batch() -> None:
    rows = ROWS.in_windows(WINDOWS)
    assert rows.lengths.tolist() == [12, 4]
    first = rows.take(np.array([0, 1]))["input_ids"]
    assert first[0].tolist() == [101, *range(1, 11), 102]
    assert first[1].tolist() == [101, 7, 8, 102]
    drawn = ROWS.in_windows(TextWindows(12, 1, 1, drawn=True))
    again = [drawn.take(np.array([0, k]))["input_ids"][0].tolist() for k in (1, 1)]
    assert again[0] == again[1]
    seen = {tuple(drawn.take(np.array([0] * n))["input_ids"][-1].tolist()) for n in range(1, 40)}
    assert len(seen) == 4
    assert rows.select(np.array([0])).windows == WINDOWS


def test_all_windows_know_their_row_and_their_logits_are_averaged() -> None:
    parts, owners = ROWS.in_windows(WINDOWS).all_windows()
    assert owners.tolist() == [0, 0, 0, 0, 1]
    assert parts.lengths.tolist() == [12, 12, 12, 12, 4]
    logits = np.array([[1, 0], [3, 0], [5, 0], [7, 4], [9, 9]], dtype=np.float32)
    assert mean_by_row(logits, owners).tolist() == [[4, 1], [9, 9]]
