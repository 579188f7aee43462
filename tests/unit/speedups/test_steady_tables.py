"""Tables whose gradient is summed in one order: the gradient of `nn.Embedding`, and torch left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conftest import tiny_bert
from tunesmith.data.batches import Padding
from tunesmith.speedups.apply import apply_speedups
from tunesmith.speedups.determinism import SteadyEmbedding, SteadyTables, deterministic, look_up


@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_and_gradient_are_those_of_torch(padding: int | None, dtype: torch.dtype) -> None:
    table = nn.Embedding(5, 4, padding_idx=padding)
    ids = torch.tensor([[0, 3, 3, 1], [2, 0, 3, 4]], dtype=dtype)
    weights = torch.arange(32.0).view(2, 4, 4)
    (table(ids) * weights).sum().backward()
    plain = table.weight.grad
    assert plain is not None
    table.weight.grad = None
    swap = SteadyTables(table)
    assert type(table) is SteadyEmbedding
    found = table(ids)
    (found * weights).sum().backward()
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad, plain)
    swap.disable()
    assert type(table) is nn.Embedding
    assert torch.equal(found, table(ids))


def test_torch_is_left_as_it_was_also_after_an_error() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    with pytest.raises(ZeroDivisionError), deterministic():
        1 / (not torch.are_deterministic_algorithms_enabled())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch._C._get_deterministic_fill_uninitialized_memory() == filled


def test_deterministic_algorithms_are_asked_for_while_the_gradient_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()

    class Watched:
        @staticmethod
        def embedding_dense_backward(given: torch.Tensor, ids: torch.Tensor, rows: int, *rest: object) -> torch.Tensor:
            asked.append(torch.are_deterministic_algorithms_enabled())
            return given.new_zeros(rows, given.shape[-1])

    table = torch.ones(3, 2, requires_grad=True)
    out = look_up(table, torch.tensor([1, 1]), None)
    monkeypatch.setattr(torch.ops, "aten", Watched)
    out.sum().backward()
    assert asked == [True]


def test_a_table_that_rescales_its_rows_computes_as_torch_does() -> None:
    table = nn.Embedding(3, 2, max_norm=0.5)
    SteadyTables(table)
    assert float(table(torch.tensor([1])).detach().norm()) <= 0.5 + 1e-6


@pytest.mark.parametrize(("pack_rows", "kind"), [("auto", SteadyEmbedding), ("off", nn.Embedding)])
def test_packed_steps_on_a_gpu_have_them(pack_rows: Any, kind: type[nn.Embedding]) -> None:
    model = tiny_bert()
    off: dict[str, Any] = dict.fromkeys(("first_token_only", "fused_layers", "cuda_graphs"), "off")
    chosen = apply_speedups(model, None, Padding(), device=torch.device("cuda"), pack_rows=pack_rows, **off)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert {type(table) for table in tables} == {kind}
    chosen.close()
    assert {type(table) for table in tables} == {nn.Embedding}
