"""Quicker CPU parts: same numbers, same distribution, no trace left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.models.families import is_compiled
from tunesmith.speedups import cpu_speed
from tunesmith.speedups.cpu_speed import QuickDropout, QuickEmbedding, QuickLinear, draw_keep_mask, enable_cpu_speed


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_and_are_unbiased(drop: float) -> None:
    torch.manual_seed(0)
    mask = draw_keep_mask(400_001, drop)
    error = (drop * (1 - drop) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).float().mean()) - drop) < 4 * error
    assert mask.unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("drop", [1 / 512, 1 / 1024, 1 - 1 / 512])
def test_shares_finer_than_eight_bits_are_kept_too(drop: float) -> None:
    torch.manual_seed(3)
    mask = draw_keep_mask(2_000_000, drop)
    error = (drop * (1 - drop) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).double().mean()) - drop) < 4 * error


def test_neighbouring_draws_are_independent() -> None:
    torch.manual_seed(1)
    mask = (draw_keep_mask(400_000, 0.5) > 0).double() - 0.5
    for lag in (1, 2, 7, 8):  # eight draws share one random integer
        assert abs(float((mask[lag:] * mask[:-lag]).mean() * 4)) < 4 / 400_000**0.5


def test_masks_follow_torchs_generator() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = draw_keep_mask(99, 0.3), draw_keep_mask(99, 0.3)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(draw_keep_mask(99, 0.3), first)


@pytest.fixture
def small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products and masks take the quicker way, too."""
    monkeypatch.setattr(cpu_speed, "_ENOUGH_PRODUCTS", 0)
    monkeypatch.setattr(cpu_speed, "_ENOUGH_VALUES", 0)


@pytest.mark.usefixtures("small_ones")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 16), (1, 100, 16), (4, 80, 16)])
def test_a_quick_linear_gives_the_output_and_gradients_of_a_plain_one(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 24, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    weights = torch.randn(*shape[:-1], 24)

    def run() -> list[torch.Tensor]:
        out = plain(x)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *plain.parameters()])]

    expected = run()
    speed = enable_cpu_speed(plain)
    assert type(plain) is QuickLinear
    for ours, theirs in zip(run(), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)
    with torch.no_grad():
        assert torch.allclose(plain(x), expected[0], atol=2e-5)
    speed.disable()
    assert type(plain) is nn.Linear


@pytest.mark.usefixtures("small_ones")
def test_a_frozen_weight_and_a_strided_gradient_are_handled() -> None:
    layer = nn.Linear(16, 24)
    layer.weight.requires_grad_(False)
    enable_cpu_speed(layer)
    x = torch.randn(100, 16, requires_grad=True)
    layer(x).t().contiguous().sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(100, -1), atol=1e-5)


@pytest.mark.usefixtures("small_ones")
def test_quick_dropout_is_silent_in_evaluation_and_leaves_other_dtypes_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    enable_cpu_speed(model)
    assert type(model[0]) is QuickDropout
    x = torch.ones(50, 50)
    assert torch.equal(model.eval()(x), x)
    model.train()
    assert set(model(x).unique().tolist()) == {0.0, 2.0}
    assert model(x.double()).dtype == torch.float64


def test_small_products_and_masks_are_torchs_own() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    x = torch.randn(100, 16)
    torch.manual_seed(0)
    expected = model(x)
    enable_cpu_speed(model)
    torch.manual_seed(0)
    assert torch.equal(model(x), expected)


def test_parameters_and_their_names_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    before = dict(model.named_parameters())
    enable_cpu_speed(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_each_part_can_stay_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    enable_cpu_speed(model, dropout=False, linear=False)
    assert [type(m) for m in model] == [nn.Linear, nn.Dropout]


def test_a_compiled_model_keeps_its_classes() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    assert not is_compiled(inner)
    enable_cpu_speed(torch.compile(inner, backend="eager"))
    assert [type(m) for m in inner] == [nn.Linear, nn.Dropout]
    inner.compile(backend="eager")
    assert is_compiled(inner)


def test_the_gradient_of_a_large_table_is_the_same_bits_in_the_same_memory() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(2**15, 128, padding_idx=0)
    ids, weights = torch.randint(0, 2**15, (2, 40)), torch.randn(2, 40, 128)
    ids[0, :3], ids[1, 5] = 0, ids[1, 6]  # padding, and a token that is there twice

    def run() -> torch.Tensor:
        (table(ids) * weights).sum().backward()
        grad, table.weight.grad = table.weight.grad, None
        assert grad is not None
        return grad

    expected = run()
    speed = enable_cpu_speed(table)
    assert type(table) is QuickEmbedding
    first = run()
    assert torch.equal(first, expected)
    held = run()  # the first is still in use: it stays as it is
    assert first.data_ptr() != held.data_ptr()
    assert torch.equal(first, expected)
    place = held.data_ptr()
    held.fill_(7.0)
    del held
    again = run()
    assert again.data_ptr() == place
    assert torch.equal(again, expected)
    table.weight.grad = None
    (table(ids) * weights).sum().backward()
    (table(ids) * weights).sum().backward()
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad, 2 * expected)
    speed.disable()
    assert type(table) is nn.Embedding


def test_a_large_table_has_its_second_derivative() -> None:
    table = nn.Embedding(2**15, 128)
    enable_cpu_speed(table)
    (grad,) = torch.autograd.grad(table(torch.tensor([[3, 4]])).pow(2).sum(), table.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), table.weight)
    assert torch.equal(second[3:5], torch.full((2, 128), 2.0))
