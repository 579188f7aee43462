"""Attention and embeddings on packed tokens match torch."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from conftest import tiny_bert
from tunesmith.data.batches import Padding
from tunesmith.errors import ConfigError
from tunesmith.speedups.apply import apply_speedups
from tunesmith.speedups.cuda_graphs import Fingerprint, no_host_randomness, why_not_captured
from tunesmith.speedups.determinism import DeterministicEmbedding, DeterministicEmbeddings
from tunesmith.speedups.packing import Layout, attend_by_padding, attend_on_cpu
from tunesmith.training.checkpoint import pack_optimizer, unpack_optimizer

HEADS, SIZE = 3, 4


def layout_for(lengths: tuple[int, ...]) -> Layout:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return Layout(lengths, max(lengths), bounds.int(), bounds[:-1], torch.arange(len(lengths)))


def row_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], first: bool
) -> torch.Tensor:
    out, q_at, k_at = [], 0, 0
    for n in lengths:
        m = 1 if first else n
        parts = (x.transpose(0, 1) for x in (q[q_at : q_at + m], k[k_at : k_at + n], v[k_at : k_at + n]))
        out.append(functional.scaled_dot_product_attention(*parts, scale=0.7).transpose(0, 1))
        q_at, k_at = q_at + m, k_at + n
    return torch.cat(out)


def tensors(lengths: tuple[int, ...], first: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    counts = (len(lengths) if first else sum(lengths), sum(lengths), sum(lengths))
    return [torch.randn(n, HEADS, SIZE, dtype=torch.float64, requires_grad=True) for n in counts]


def assert_equal(out: torch.Tensor, expected: torch.Tensor, inputs: Any) -> None:
    """Assert equal outputs, and equal gradients of the inputs."""
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (1, 2, 5, 9), (2, 2, 7, 7, 8), (2, 60, 61, 90)])
def test_packed_attention_equals_torch_row_by_row(lengths: tuple[int, ...], first: bool) -> None:
    q, k, v = tensors(lengths, first)
    expected = row_by_row(q, k, v, lengths, first)
    out = attend_on_cpu(q, k, v, layout_for(lengths), 0.7, 0.0, first)
    assert_equal(out, expected, (q, k, v))


def test_packed_attention_with_a_window_equals_padding() -> None:
    lengths, window = (3, 12, 40), 4
    q, k, v = tensors(lengths, False)
    layout = layout_for(lengths)
    expected = attend_by_padding(q, k, v, layout, 0.7, 0.0, False, window)
    out = attend_on_cpu(q, k, v, layout, 0.7, 0.0, False, window)
    assert_equal(out, expected, (q, k, v))


@pytest.mark.parametrize("first", [False, True])
def test_packed_attention_with_a_bias_equals_softmax(first: bool) -> None:
    lengths = (2, 3, 60)
    inputs = tensors(lengths, first)
    bias = torch.randn(HEADS, 60, 60, dtype=torch.float64, requires_grad=True)
    out = attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.0, first, bias=bias)
    with torch.no_grad():
        assert torch.allclose(attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.0, first, bias=bias), out, atol=1e-9)
    expected, q_at, k_at = [], 0, 0
    for n in lengths:
        m = 1 if first else n
        q, k, v = (
            x.transpose(0, 1)
            for x in (inputs[0][q_at : q_at + m], inputs[1][k_at : k_at + n], inputs[2][k_at : k_at + n])
        )
        weights = torch.softmax(q @ k.transpose(1, 2) * 0.7 + bias[:, :m, :n], -1)
        expected.append((weights @ v).transpose(0, 1))
        q_at, k_at = q_at + m, k_at + n
    assert_equal(out, torch.cat(expected), (*inputs, bias))


def test_filler_gets_no_gradient() -> None:
    q, k, v = tensors((2, 3), True)
    more = [torch.cat([x, torch.full_like(x[:2], 9.0)]).detach().requires_grad_() for x in (k, v)]
    queries = torch.cat([q, torch.full_like(q[:1], 9.0)])  # the filler has a first token as well
    out = attend_on_cpu(queries, *more, layout_for((2, 3, 2)), 0.7, 0.0, True)[:2]
    assert torch.allclose(out, row_by_row(q, k, v, (2, 3), True), atol=1e-12)
    for grad in torch.autograd.grad(out.sum(), more):
        assert torch.equal(grad[5:], torch.zeros_like(grad[5:]))


@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_deterministic_embedding_equals_torch(padding: int | None, dtype: torch.dtype) -> None:
    table = nn.Embedding(5, 4, padding_idx=padding)
    ids = torch.tensor([[0, 3, 3, 1], [2, 0, 3, 4]], dtype=dtype)
    weights = torch.arange(32.0).view(2, 4, 4)
    (table(ids) * weights).sum().backward()
    plain = table.weight.grad
    assert plain is not None
    table.weight.grad = None
    swap = DeterministicEmbeddings(table)
    assert type(table) is DeterministicEmbedding
    found = table(ids)
    (found * weights).sum().backward()
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad, plain)
    swap.disable()
    assert type(table) is nn.Embedding
    assert torch.equal(found, table(ids))


@pytest.mark.parametrize(("pack_rows", "kind"), [("auto", DeterministicEmbedding), ("off", nn.Embedding)])
def test_packed_steps_on_a_gpu_use_deterministic_tables(pack_rows: Any, kind: type[nn.Embedding]) -> None:
    model = tiny_bert()
    off: dict[str, Any] = dict.fromkeys(("first_token_only", "fused_layers", "cuda_graphs"), "off")
    chosen = apply_speedups(model, None, Padding(), device=torch.device("cuda"), pack_rows=pack_rows, **off)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert {type(table) for table in tables} == {kind}
    chosen.close()
    assert {type(table) for table in tables} == {nn.Embedding}


CPU = torch.device("cpu")


@pytest.mark.parametrize("change", ["load_state_dict", "checkpoint", "settings", "nothing"])
def test_fingerprint_changes_with_moments_and_settings(change: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    fingerprint = Fingerprint(model, optimizer)
    found = []
    for _ in range(4):
        found.append(fingerprint.of_step())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert len(set(found)) == 1, "the first step creates the moments, which is not a change"
    saved, (tensors, plain) = copy.deepcopy(optimizer.state_dict()), pack_optimizer(optimizer)
    held = [v for state in optimizer.state.values() for v in state.values()]  # so that it is not replaced
    if change == "load_state_dict":
        optimizer.load_state_dict(saved)
    elif change == "checkpoint":
        unpack_optimizer(optimizer, {n: t.clone() for n, t in tensors.items()}, plain, "here")
    elif change == "settings":
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    assert len(held) == 6
    assert (fingerprint.of_step() == found[0]) == (change == "nothing")


def test_cuda_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="--cuda_graphs on is not possible: they require a GPU"):
        apply_speedups(tiny_bert(), None, Padding(), device=CPU, cuda_graphs="on")
    assert apply_speedups(tiny_bert(), None, Padding(), device=CPU).notes == ()


@pytest.mark.parametrize(
    ("device", "pack_rows", "order"),
    [("cuda", "auto", "random"), ("cuda", "off", "group_by_length"), ("cpu", "auto", "group_by_length")],
)
def test_best_order_groups_lengths_unless_packed_on_a_gpu(device: str, pack_rows: Any, order: str) -> None:
    chosen = apply_speedups(tiny_bert(), None, Padding(), device=CPU, pack_rows=pack_rows)
    assert chosen.best_order(torch.device(device)) == order


SIZES = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, lambda: np.random.rand()])
def test_step_that_draws_on_host_is_not_captured(draw: Any) -> None:
    with pytest.raises(RuntimeError, match="random numbers on the host"), no_host_randomness():
        draw()
    with no_host_randomness():
        torch.rand((), generator=torch.Generator())


def test_only_models_of_transformers_are_captured() -> None:
    config = transformers.RoFormerConfig(**SIZES, embedding_size=16)
    model = transformers.RoFormerForSequenceClassification(config)
    assert why_not_captured(model) is None

    class Own(transformers.RoFormerForSequenceClassification):
        pass

    assert "may do work on the host" in (why_not_captured(Own(config)) or "")
    handle = model.classifier.register_forward_hook(lambda *_: None)
    assert "hooks" in (why_not_captured(model) or "")
    handle.remove()
    bert = tiny_bert()
    bert.gradient_checkpointing_enable()
    assert "repeats layers" in (why_not_captured(bert) or "")
