"""A batch in one block of memory is the same batch."""

from __future__ import annotations

import numpy as np
import torch

from tunesmith.data.batches import Batch, Padding, pin_batch, tensors_of, views_of, with_tensors
from tunesmith.speedups.packing import pack

ROWS = {"input_ids": [np.arange(1, n) for n in (5, 3, 8)], "token_type_ids": [np.zeros(n - 1, int) for n in (5, 3, 8)]}


def split_rows(batch: Batch, limit: int) -> list[Batch]:
    return [batch]


def make_batches() -> list[Batch]:
    labels = torch.tensor([0, 2, 1])
    filled = dict(pack(ROWS, total=32, longest=64, fillers=2, dtype=np.int32))
    inputs = [dict(Padding()(ROWS)), dict(pack(ROWS)), filled]
    return [Batch(one, labels, np.arange(3), 13, 13, split_rows) for one in inputs]


def test_a_batch_in_one_block_has_the_same_values_types_and_shapes() -> None:
    for batch in make_batches():
        pinned = pin_batch(batch)
        assert pinned.block is not None
        assert pinned.inputs.keys() == batch.inputs.keys()
        assert pinned.split is split_rows
        for one, other in zip(tensors_of(batch), tensors_of(pinned), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
            assert other.untyped_storage().data_ptr() == pinned.block.untyped_storage().data_ptr()
            assert other.data_ptr() % 16 == pinned.block.data_ptr() % 16


def test_one_copy_of_the_block_moves_all_of_another_batch() -> None:
    for batch in make_batches():
        first = pin_batch(batch)
        changed = pin_batch(with_tensors(batch, [t + 1 for t in tensors_of(batch)]))
        assert first.block is not None
        assert changed.block is not None
        block = first.block.clone()
        fixed = with_tensors(first, views_of(block, tensors_of(first)), block=block)
        block.copy_(changed.block)
        for one, other in zip(tensors_of(fixed), tensors_of(changed), strict=True):
            assert torch.equal(one, other)


def test_a_batch_without_labels_has_none_afterwards() -> None:
    batch = make_batches()[0]
    plain = Batch(batch.inputs, None, batch.rows, 13, 13)
    assert pin_batch(plain).labels is None
