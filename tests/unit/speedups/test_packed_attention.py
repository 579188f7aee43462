"""Every way to attend over packed rows gives the same output and the same gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tunesmith.speedups.packing import Layout, attend_by_mask, attend_by_padding, pack


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("total", [None, 40])
def test_padding_for_the_attention_alone_equals_the_block_mask(total: int | None, first_only: bool) -> None:
    layout = pack({"input_ids": [np.arange(n) for n in (5, 1, 9, 7, 3)]}, total=total)["layout"]
    assert isinstance(layout, Layout)
    torch.manual_seed(0)
    size = int(layout.bounds[-1])
    q, k, v = (torch.randn(size, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    queries = q.index_select(0, layout.starts) if first_only else q
    ours = attend_by_padding(queries, k, v, layout, 0.3, 0.0, first_only)
    plain = attend_by_mask(queries, k, v, layout, 0.3, 0.0, first_only)
    assert torch.allclose(ours, plain, atol=1e-12)
    weights = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v), retain_graph=True),
        torch.autograd.grad((plain * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)
