"""Attention in one order: deterministic algorithms around the kernel's backward pass alone, and nothing left behind."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

from tunesmith.speedups import steady_attention as steady

GPU = torch.device("cuda")


class FakeFlashAttention(torch.autograd.Function):
    """Named as torch names the nodes of its kernels; notes what was asked for while its backward pass ran."""

    seen: ClassVar[list[tuple[bool, bool]]] = []
    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        FakeFlashAttention.seen.append(asked_for())
        if FakeFlashAttention.fails:
            raise torch.OutOfMemoryError("no memory")
        return grad * 2


def asked_for() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A result of the fake kernel behind a transposition, as on a GPU."""
    FakeFlashAttention.seen, FakeFlashAttention.fails = [], False
    x = torch.ones(2, 3, requires_grad=True)
    out = FakeFlashAttention.apply(x).t()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return steady.order_gradient(out), x


def test_only_the_backward_pass_of_the_kernel_is_run_in_one_order(attended: Any) -> None:
    out, x = attended
    around = []
    out.grad_fn.register_hook(lambda *_: around.append(asked_for()))
    x.register_hook(lambda _: around.append(asked_for()))
    out.sum().backward()
    assert FakeFlashAttention.seen == [(True, False)]
    assert around == [(False, False)] * 2
    assert asked_for() == (False, False)
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


def test_a_backward_pass_that_breaks_off_leaves_no_order_behind(attended: Any) -> None:
    out, _ = attended
    FakeFlashAttention.fails = True
    with pytest.raises(torch.OutOfMemoryError), steady.steady_attention(GPU):
        out.sum().backward()
    assert FakeFlashAttention.seen == [(True, False)]
    assert asked_for() == (False, False)


def test_what_is_no_such_kernel_is_left_alone() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert steady.kernel_node((x * 2).t().grad_fn) is None
    assert steady.kernel_node(None) is None
    far = FakeFlashAttention.apply(x)  # type: ignore[no-untyped-call]
    for _ in range(6):
        far = far + 1
    assert steady.kernel_node(far.grad_fn) is None, "another layer's attention is not this call's"


def test_torchs_attention_is_another_inside_and_its_own_after_it() -> None:
    own, q = functional.scaled_dot_product_attention, torch.randn(1, 2, 4, 8)
    expected = own(q, q, q)
    with steady.steady_attention(GPU):
        assert functional.scaled_dot_product_attention is not own
        with steady.steady_attention(GPU):
            assert torch.equal(functional.scaled_dot_product_attention(q, q, q), expected)
        assert functional.scaled_dot_product_attention is not own
    assert functional.scaled_dot_product_attention is own
    with steady.steady_attention(torch.device("cpu")):
        assert functional.scaled_dot_product_attention is own


@pytest.mark.parametrize(("warn_only", "replaced"), [(False, False), (True, True)])
def test_a_user_who_asks_for_strict_determinism_has_it_and_one_who_asks_for_warnings_gets_the_order(
    warn_only: bool, replaced: bool
) -> None:
    own = functional.scaled_dot_product_attention
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with steady.steady_attention(GPU):
            assert (functional.scaled_dot_product_attention is not own) == replaced
        assert asked_for() == (True, warn_only)
    finally:
        torch.use_deterministic_algorithms(False)


def test_cudnns_kernel_is_not_chosen_unless_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def noted(*args: Any) -> torch.Tensor:
        seen.append(torch._C._get_cudnn_sdp_enabled())
        return torch.zeros(1)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    was = torch._C._get_cudnn_sdp_enabled()
    torch._C._set_sdp_use_cudnn(True)
    try:
        for alone in (False, True):
            monkeypatch.setattr(steady, "_has_another_kernel", lambda alone=alone: not alone)
            with steady.steady_attention(GPU):
                functional.scaled_dot_product_attention(torch.zeros(1))
            assert torch._C._get_cudnn_sdp_enabled()
    finally:
        torch._C._set_sdp_use_cudnn(was)
    assert seen == [False, True]
