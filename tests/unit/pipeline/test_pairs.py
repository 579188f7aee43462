"""The pair start: the texts of rows are found in their tokens, judged, put together anew, and learned without a label."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tunesmith.data.tokens import TokenRows
from tunesmith.labels import LabelMap
from tunesmith.pipeline.pair_warmup import PairReadings, PairTexts, compare_sides, make_pairs, read_alone
from tunesmith.pipeline.probe import FrozenFeatures, fit_linear

LABELS = LabelMap.for_classes(["other", "same"])


def pair_rows(count: int, between: int = 1, *, types: bool = True) -> TokenRows:
    """Two texts of four tokens; the label says whether they begin with the same token."""
    rng = np.random.default_rng(0)
    ids, kinds, labels = [], [], []
    for i in range(count):
        a, b = rng.integers(10, 90, 4).tolist(), rng.integers(10, 90, 4).tolist()
        b[0] = a[0] if i % 2 else (a[0] - 9) % 80 + 10
        ids.append([1, *a, *[2] * between, *b, 2])
        kinds.append([0] * (5 + between) + [1] * 5)
        labels.append(int(a[0] == b[0]))
    columns: dict[str, Any] = {"input_ids": ids, "labels": labels}
    return TokenRows.from_lists({**columns, "token_type_ids": kinds} if types else columns)


def lists(rows: TokenRows, name: str = "input_ids") -> list[list[int]]:
    return [values.tolist() for values in rows.columns[name].take(np.arange(len(rows)))]


@pytest.mark.parametrize("between", [1, 2])
def test_texts_are_found_and_put_together_as_they_were(between: int) -> None:
    rows = pair_rows(6, between)
    texts = PairTexts.of(rows)
    assert texts is not None
    assert lists(texts.alone(0)) == [[*row[:5], 2] for row in lists(rows)]
    again = texts.together(range(6), range(6), np.zeros((6, 3), np.float32))
    assert lists(again) == lists(rows)
    assert lists(again, "token_type_ids") == lists(rows, "token_type_ids")
    other = texts.together([0], [3], np.zeros((1, 3), np.float32))
    assert lists(other)[0] == [*lists(rows)[0][: 5 + between], *lists(rows)[3][5 + between :]]


def test_rows_of_one_text_are_no_pairs_and_tokens_without_types_get_none() -> None:
    assert PairTexts.of(TokenRows.from_lists({"input_ids": [[1, 7, 8, 2], [1, 9, 2]]})) is None
    texts = PairTexts.of(pair_rows(3, types=False))
    assert texts is not None
    assert set(texts.alone(1).columns) == {"input_ids"}


def test_no_pair_is_longer_than_the_rows_it_is_made_of() -> None:
    rows = TokenRows.from_lists({"input_ids": [[1, *[7] * 30, 2, 8, 2], [1, 7, 2, *[8] * 28, 2]]})
    texts = PairTexts.of(rows)
    assert texts is not None
    made = texts.together([0, 1], [1, 0], np.zeros((2, 1), np.float32))
    assert made.lengths.tolist() == [34, 5]
    assert np.bincount(lists(made)[0])[[7, 8]].tolist() == [15, 16]


def reader(known: bool) -> Any:
    """An encoder of one vector for each first token, or one that is the same for all but noise."""
    table = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))

    def read(rows: TokenRows) -> FrozenFeatures:
        found = table[[row[1] for row in lists(rows)]] if known else torch.randn(len(rows), 16)
        return FrozenFeatures(found.half(), found.half())

    return read


def test_texts_read_alone_are_used_where_they_explain_the_labels_beyond_doubt() -> None:
    rows, seen = pair_rows(300), np.arange(200)
    torch.manual_seed(0)
    blind = fit_linear(torch.randn(200, 16), torch.from_numpy(rows.labels[:200]), LABELS.task, 2)  # type: ignore[index]
    found, why = read_alone(rows, seen, LABELS, reader(known=True), blind)
    assert found is not None
    assert len(found.vectors[0]) == len(found.texts.sides[0]) == 300
    assert why.startswith("R2 of held-out examples 0.")
    assert read_alone(rows, seen, LABELS, reader(known=False), blind)[0] is None
    assert read_alone(rows, seen, LABELS, reader(known=False), None)[0] is not None, "asked for"
    knowing = fit_linear(
        torch.from_numpy(rows.labels[:200, None]).float(), torch.from_numpy(rows.labels[:200]), LABELS.task, 2
    )  # type: ignore[index]
    assert read_alone(rows, seen, LABELS, reader(known=True), knowing)[0] is None, "both at once say more already"


def readings() -> PairReadings:
    found, _ = read_alone(pair_rows(40), np.arange(40), LABELS, reader(known=True), None)
    assert found is not None
    return found


def test_the_labels_of_pairs_are_what_two_readings_say_of_them() -> None:
    found = readings()
    made = make_pairs(found, 200, seed=4)
    assert made.labels is not None
    assert made.labels.shape == (200, 33)
    assert np.allclose(made.labels.mean(0), 0, atol=1e-5)
    table = {tuple(t.tolist()): found.vectors[0][i] for i, t in enumerate(found.texts.sides[0])}
    other = {tuple(t.tolist()): found.vectors[1][i] for i, t in enumerate(found.texts.sides[1])}
    u = torch.stack([table[tuple(row[1:5])] for row in lists(made)])
    v = torch.stack([other[tuple(row[6:10])] for row in lists(made)])
    cosine = compare_sides(u, v)[:, -1].numpy()
    assert np.corrcoef(cosine, made.labels[:, -1])[0, 1] > 0.999
    assert np.array_equal(make_pairs(found, 200, seed=4).labels, made.labels)
    assert not np.array_equal(make_pairs(found, 200, seed=5).labels, made.labels)
