"""Token rows, padding, windows of ranks, evaluation batches, prefetching."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from conftest import token_lists
from patience import patient
from tunesmith.data.batches import Batches, Padding, evaluation_batches, make_batch
from tunesmith.data.tokens import TokenRows, prefetched


def test_rows_from_a_memory_mapped_arrow_file_of_many_chunks_are_the_rows_written(tmp_path: Path) -> None:
    data = token_lists(57)
    table = pa.table({k: pa.array(v) for k, v in data.items()})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=5):
            writer.write_batch(batch)
    mapped = pa.ipc.open_file(pa.memory_map(str(tmp_path / "t.arrow"))).read_all()
    rows = TokenRows.from_arrow(mapped)
    assert len(rows) == 57
    assert rows.lengths.tolist() == [len(i) for i in data["input_ids"]]
    asked = np.array([56, 0, 4, 5, 31, 5])
    taken = rows.take(asked)
    for name in ("input_ids", "token_type_ids"):
        assert [r.tolist() for r in taken[name]] == [data[name][i] for i in asked]
    assert rows.labels is not None
    assert rows.labels.tolist() == data["labels"]
    assert rows.used_ids(160).tolist() == sorted({v for r in data["input_ids"] for v in r})


def test_selected_rows_keep_their_labels() -> None:
    data = token_lists(10)
    some = TokenRows.from_lists(data).select(np.array([7, 2]))
    assert [r.tolist() for r in some.take(np.array([0, 1]))["input_ids"]] == [
        data["input_ids"][7],
        data["input_ids"][2],
    ]
    assert some.labels is not None
    assert some.labels.tolist() == [data["labels"][7], data["labels"][2]]


@pytest.mark.parametrize(
    ("padding", "width"),
    [(Padding(), 7), (Padding(multiple_of=4), 8), (Padding(fixed_length=12), 12), (Padding(side="left"), 7)],
)
def test_padding_fills_the_side_it_is_told_and_masks_it(padding: Padding, width: int) -> None:
    rows = [np.array([5, 6, 7]), np.array([1, 2, 3, 4, 5, 6, 7])]
    batch = Padding(9, 3, padding.side, padding.multiple_of, padding.fixed_length)(
        {"input_ids": rows, "token_type_ids": rows}
    )
    assert batch["input_ids"].shape == (2, width)
    first = batch["input_ids"][0].tolist()
    real = [5, 6, 7]
    assert first == ([9] * (width - 3) + real if padding.side == "left" else real + [9] * (width - 3))
    assert batch["attention_mask"][0].sum() == 3
    assert batch["attention_mask"][1].sum() == 7
    assert (batch["token_type_ids"][0][batch["attention_mask"][0] == 0] == 3).all()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_each_window_without_overlap_and_a_rank_without_rows_is_idle(world: int, accumulation: int) -> None:
    rows = TokenRows.from_lists(token_lists(25))
    parts = [
        list(Batches(rows, Padding(), 4, seed=1, accumulation=accumulation, rank=r, world=world).windows(0))
        for r in range(world)
    ]
    assert len({len(p) for p in parts}) == 1
    for windows in zip(*parts, strict=True):
        mine = [r for w in windows if not w.idle for b in w.micro_batches for r in b.rows.tolist()]
        assert sorted(mine) == sorted(windows[0].rows.tolist())
        assert all(w.micro_batches for w in windows)
        assert all(len(b) <= 4 for w in windows for b in w.micro_batches)


def test_skipped_windows_are_those_that_would_have_come_first() -> None:
    batches = Batches(TokenRows.from_lists(token_lists(30)), Padding(), 4, seed=1)
    whole = [w.rows.tolist() for w in batches.windows(2)]
    assert [w.rows.tolist() for w in batches.windows(2, skip=5)] == whole[5:]
    assert len(whole) == batches.steps_in_epoch(2)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_windows_prepared_ahead_are_the_same_windows(sampling: Any) -> None:
    plain = Batches(TokenRows.from_lists(token_lists(50)), Padding(), 4, seed=1, accumulation=2, sampling=sampling)
    for skip in (0, 3):
        pairs = zip(plain.windows(1, skip), replace(plain, ahead=3).windows(1, skip), strict=True)
        for one, other in pairs:
            assert one.rows.tolist() == other.rows.tolist()
            for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
                assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
                assert torch.equal(a.labels, b.labels)  # type: ignore[arg-type]


def test_evaluation_batches_hold_every_row_once_and_respect_both_limits() -> None:
    rows = TokenRows.from_lists(token_lists(40, longest=30))
    found: list[int] = []
    for batch in evaluation_batches(rows, Padding(), max_rows=16, max_tokens=100):
        assert len(batch) <= 16
        assert len(batch) == 1 or batch.padded_tokens <= 100
        found += batch.rows.tolist()
    assert sorted(found) == list(range(40))


def test_a_batch_counts_real_and_padded_tokens() -> None:
    rows = TokenRows.from_lists({"input_ids": [[1, 2, 3], [1]], "labels": [0, 1]})
    batch = make_batch(rows, np.array([0, 1]), Padding())
    assert (batch.tokens, batch.padded_tokens) == (4, 6)
    assert torch.equal(batch.labels, torch.tensor([0, 1]))  # type: ignore[arg-type]


def test_prefetched_items_come_in_order_and_an_error_arrives_where_its_item_would() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise ValueError("broken at 5")

    seen: list[int] = []
    items = prefetched(source(), lambda x: x * 2)
    with pytest.raises(ValueError, match="broken at 5"):
        seen.extend(items)
    assert seen == [0, 2, 4, 6, 8]


def test_leaving_a_prefetched_loop_stops_its_thread() -> None:
    import threading

    def forever() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    before = threading.active_count()
    items: Any = prefetched(forever(), lambda x: x)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    items.close()
    deadline = time.monotonic() + patient(5)
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
