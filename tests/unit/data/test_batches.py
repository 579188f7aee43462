"""Token rows, padding, the order of an epoch, windows of ranks, evaluation batches, prefetching."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows, epoch_order, evaluation_batches


def test_chunked_arrow_file_reads_back_equal(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_each_window_without_overlap(world: int, accumulation: int) -> None:
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


def test_skipped_windows_are_the_first_ones() -> None:
    batches = Batches(TokenRows.from_lists(token_lists(30)), Padding(), 4, seed=1)
    whole = [w.rows.tolist() for w in batches.windows(2)]
    assert [w.rows.tolist() for w in batches.windows(2, skip=5)] == whole[5:]
    assert len(whole) == batches.steps_in_epoch(2)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_prefetched_windows_are_equal(sampling: Any) -> None:
    plain = Batches(TokenRows.from_lists(token_lists(50)), Padding(), 4, seed=1, accumulation=2, sampling=sampling)
    for skip in (0, 3):
        pairs = zip(plain.windows(1, skip), replace(plain, ahead=3).windows(1, skip), strict=True)
        for one, other in pairs:
            assert one.rows.tolist() == other.rows.tolist()
            for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
                assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
                assert torch.equal(a.labels, b.labels)  # type: ignore[arg-type]


def test_evaluation_batches_contain_every_row_once() -> None:
    rows = TokenRows.from_lists(token_lists(40, longest=30))
    found: list[int] = []
    for batch in evaluation_batches(rows, Padding(), max_rows=16, max_tokens=100):
        assert len(batch) <= 16
        assert len(batch) == 1 or batch.padded_tokens <= 100
        found += batch.rows.tolist()
    assert sorted(found) == list(range(40))


LENGTHS = np.random.default_rng(0).integers(5, 120, 1003)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    per_step=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
    sampling=st.sampled_from(["random", "sequential", "group_by_length"]),
)
def test_epoch_contains_every_row_once(rows: int, per_step: int, seed: int, epoch: int, sampling: Any) -> None:
    order = epoch_order(rows, seed=seed, epoch=epoch, rows_per_step=per_step, sampling=sampling, lengths=LENGTHS)
    assert sorted(order.rows.tolist()) == list(range(rows))
    windows = [order.window(i) for i in range(len(order))]
    assert sum(len(w) for w in windows) == rows
    assert all(len(w) for w in windows)
    assert [len(w) for w in windows[:-1]] == [per_step] * (len(windows) - 1)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_order_depends_on_seed_and_epoch_only(sampling: Any) -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        np.random.seed(None)
        order = epoch_order(1003, seed=seed, epoch=epoch, rows_per_step=8, sampling=sampling, lengths=LENGTHS)
        return [int(r) for r in order.rows]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1)
    assert rows(1, 0) != rows(2, 0)


def test_group_by_length_leaves_little_padding() -> None:
    def padded(sampling: Any) -> float:
        order = epoch_order(1003, seed=3, epoch=0, rows_per_step=8, sampling=sampling, lengths=LENGTHS)
        windows = [LENGTHS[order.window(i)] for i in range(len(order))]
        return float(sum(w.max() * len(w) for w in windows) / LENGTHS.sum())

    assert padded("random") > 1.5
    assert padded("group_by_length") < 1.06
