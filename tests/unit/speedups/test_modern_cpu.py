"""ModernBERT's parts on the CPU against transformers' own formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from tunesmith.speedups.attention import attend_by_mask
from tunesmith.speedups.modern_cpu import _GatedGelu, attend_rotary
from tunesmith.speedups.packing import Layout

HEADS, SIZE = 2, 8


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(1,), (3, 4, 9), (2, 70, 71)])
def test_rotary_attention_equals_turning_and_attending_apart(lengths: tuple[int, ...], window: int | None) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    layout = Layout(lengths, max(lengths), bounds.int(), bounds[:-1], torch.arange(len(lengths)))
    tokens = sum(lengths)
    qkv = torch.randn(tokens, 3, HEADS, SIZE, requires_grad=True)
    places = torch.cat([torch.arange(n) for n in lengths])
    # Not of two equal halves, as those of rotary positions are: a mistake in the order of the halves would not show.
    angles = places.unsqueeze(1) * torch.linspace(0.1, 1.5, SIZE)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = (qkv[:, part].transpose(0, 1).unsqueeze(0) for part in range(3))
    q, k = apply_rotary_pos_emb(q, k, cos.unsqueeze(0), sin.unsqueeze(0))
    turned = [x.squeeze(0).transpose(0, 1) for x in (q, k, v)]
    expected = attend_by_mask(*turned, layout, 0.6, 0.0, False, window)
    out = attend_rotary(qkv, cos, sin, layout, 0.6, 0.0, window)
    assert torch.allclose(out, expected, atol=1e-6)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(one, qkv, grad)[0] for one in (out, expected))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_gated_gelu_has_both_derivatives() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    value, gate = x.chunk(2, -1)
    assert torch.equal(_GatedGelu.apply(x), functional.gelu(value) * gate)  # type: ignore[no-untyped-call]
    assert torch.autograd.gradcheck(_GatedGelu.apply, (x,))
    assert torch.autograd.gradgradcheck(_GatedGelu.apply, (x,))
