"""Who may see a gradient before the backward pass is over."""

from __future__ import annotations

import pytest
import torch

from tunesmith.speedups.fused_ops import nobody_looks, ones, sum_rows


def test_fresh_parameters_are_looked_at_by_nobody() -> None:
    assert nobody_looks([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))])


def test_a_gradient_that_is_added_to_and_hooks_are_seen() -> None:
    plain = torch.nn.Parameter(torch.ones(2))
    added, hooked, after = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    added.grad = torch.ones(2)
    hooked.register_hook(lambda gradient: gradient)
    after.register_post_accumulate_grad_hook(lambda parameter: None)
    for one in (added, hooked, after):
        assert not nobody_looks([plain, one])


def test_several_ranks_exchange_gradients_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not nobody_looks([torch.nn.Parameter(torch.ones(2))])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert nobody_looks([torch.nn.Parameter(torch.ones(2))])


def test_a_vector_of_ones_stays_where_it_is_and_grows() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    first = ones(10, like)
    assert ones(4000, like).data_ptr() == first.data_ptr()
    longer = ones(5000, like)
    assert longer.shape == (5000,)
    assert bool((longer == 1).all())
    kept = [t.data_ptr() for t in ones._kept[like.device, like.dtype]]
    assert kept == [first.data_ptr(), longer.data_ptr()], "a captured step goes on reading the first"


def test_sums_over_rows_are_float32_whatever_comes() -> None:
    x = torch.randn(70, 3, 5).bfloat16()
    assert torch.allclose(sum_rows(x), x.float().sum(0), atol=1e-4)
    assert sum_rows(x).dtype == torch.float32
