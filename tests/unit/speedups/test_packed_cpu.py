"""Attention over packed tokens on the CPU, against torch's own attention row by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tunesmith.speedups import packing
from tunesmith.speedups.packing import Layout, attend_by_padding, attend_on_cpu

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


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (6,), (1, 1), (1, 2, 5, 9), (4, 4, 4), (2, 2, 7, 7, 8), (2, 60, 61, 90)])
def test_output_and_gradients_equal_attention_row_by_row(lengths: tuple[int, ...], first: bool) -> None:
    q, k, v = tensors(lengths, first)
    expected = row_by_row(q, k, v, lengths, first)
    out = attend_on_cpu(q, k, v, layout_for(lengths), 0.7, 0.0, first)
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_window_hides_what_is_further_away_and_leaves_no_query_without_a_key() -> None:
    lengths, window = (3, 12, 40), 4
    q, k, v = tensors(lengths, False)
    layout = layout_for(lengths)
    expected = attend_by_padding(q, k, v, layout, 0.7, 0.0, False, window)
    out = attend_on_cpu(q, k, v, layout, 0.7, 0.0, False, window)
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("first", [False, True])
def test_a_bias_of_places_is_added_to_the_scores_and_has_its_gradient(first: bool) -> None:
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
    assert torch.allclose(out, torch.cat(expected), atol=1e-12)
    grad = torch.randn_like(out)
    given = (*inputs, bias)
    for ours, theirs in zip(
        torch.autograd.grad(out, given, grad), torch.autograd.grad(torch.cat(expected), given, grad), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_filling_gets_no_gradient_from_the_first_tokens_of_rows() -> None:
    q, k, v = tensors((2, 3), True)
    more = [torch.cat([x, torch.full_like(x[:2], 9.0)]).detach().requires_grad_() for x in (k, v)]
    queries = torch.cat([q, torch.full_like(q[:1], 9.0)])  # the filling has a first token as well
    out = attend_on_cpu(queries, *more, layout_for((2, 3, 2)), 0.7, 0.0, True)[:2]
    assert torch.allclose(out, row_by_row(q, k, v, (2, 3), True), atol=1e-12)
    for grad in torch.autograd.grad(out.sum(), more):
        assert torch.equal(grad[5:], torch.zeros_like(grad[5:]))


def test_gradients_with_dropout_belong_to_the_mask_that_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (2, 5, 5)
    torch.manual_seed(3)
    mask = (torch.rand(HEADS * len(lengths) * max(lengths) ** 2) > 0.3).double()
    monkeypatch.setattr(packing, "draw_keep_mask", lambda like, drop: mask[: like.numel()])
    inputs = tensors(lengths, False)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend_on_cpu(q, k, v, layout_for(lengths), 0.7, 0.3, False), inputs
    )
    without = attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.0, False)
    assert not torch.allclose(attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.3, False), without)


@pytest.mark.parametrize("first", [False, True])
def test_without_a_gradient_torchs_own_kernel_gives_the_same(first: bool) -> None:
    lengths = (2, 5, 5, 40, 130)
    inputs = tensors(lengths, first)
    expected = attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.0, first)
    with torch.no_grad():
        found = attend_on_cpu(*inputs, layout_for(lengths), 0.7, 0.0, first)
    assert torch.allclose(found, expected, atol=1e-9)
