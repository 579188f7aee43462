"""Fused layers have the loss, gradients and weights of transformers' layers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equivalence.strategy_cases import (
    CUT_FAMILIES,
    MANY_STEPS,
    PAD,
    RAGGED,
    assert_same_step,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.speedups.cuda_graphs import Fingerprint
from tunesmith.speedups.fused_layers import fuse_layers, why_not_fused
from tunesmith.speedups.packing import FirstTokenOnly, PaddingFree, pack


def packed(rows: dict[str, list[np.ndarray]], strategy: PaddingFree, **options: Any) -> dict[str, Any]:
    return pack(rows, first_position=strategy.first_position, keys=strategy.keys, **options)


def fuse(model: nn.Module, *, first_only: bool, dtype: torch.dtype = torch.float32) -> PaddingFree:
    strategy = PaddingFree(model)
    fuse_layers(model, dtype, first_token_only=first_only)
    return strategy


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_model_is_the_same_after_fused_layers_were_off(kind: str) -> None:
    """Otherwise each step after a user's callback would be verified again, which takes as long as 50 steps."""
    model = make_model(kind)
    PaddingFree(model)
    fused = fuse_layers(model, torch.bfloat16, first_token_only=False)
    before = Fingerprint(model).of_model()
    fused.disable()
    assert Fingerprint(model).of_model() != before
    fused.enable()
    assert Fingerprint(model).of_model() == before


MODERN = ("modernbert", "modernbert-mean")


@pytest.mark.parametrize("total", [None, 64])
@pytest.mark.parametrize(
    ("kind", "first_only"), [*itertools.product(CUT_FAMILIES, (False, True)), *((kind, False) for kind in MODERN)]
)
def test_fused_loss_logits_and_gradients_match_padded(kind: str, first_only: bool, total: int | None) -> None:
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    plain = gradients(model, pad_rows(rows, kind=kind), labels)
    options = {} if total is None else {"total": total, "longest": 32}
    batch = packed(rows, fuse(model, first_only=first_only), **options)
    assert_same_step(plain, gradients(model, batch, labels))


@pytest.mark.parametrize("steps", MANY_STEPS)
@pytest.mark.parametrize("kind", [*CUT_FAMILIES, *MODERN])
def test_weights_after_many_fused_steps_equal_plain_training(kind: str, steps: int) -> None:
    plain = make_model(kind)
    ours = copy.deepcopy(plain)
    strategy = fuse(ours, first_only=kind in CUT_FAMILIES)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=5e-5, weight_decay=0.1) for m in (plain, ours)]
    for step in range(steps):
        rows = make_rows(np.random.default_rng(step).integers(1, 20, 6), seed=step, pad=PAD.get(kind, 0))
        labels = make_labels(6, seed=step)
        for model, optimizer, batch in zip(
            (plain, ours), optimizers, (pad_rows(rows, kind=kind), packed(rows, strategy)), strict=True
        ):
            optimizer.zero_grad()
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_fused_half_precision_is_as_accurate_as_autocast(kind: str) -> None:
    model = make_model(kind)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    _, _, exact = gradients(model, pad_rows(rows, kind=kind), labels)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, theirs = gradients(model, pad_rows(rows, kind=kind), labels)
    strategy = fuse(model, first_only=kind == "bert", dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, ours = gradients(model, packed(rows, strategy), labels)

    def error(found: dict[str, torch.Tensor]) -> float:
        return float(sum((found[n].double() - exact[n].double()).square().sum() for n in exact)) ** 0.5

    assert 0 < error(ours) < 1.2 * error(theirs)


def test_frozen_layers_get_no_gradient_and_others_are_unchanged() -> None:
    model = make_model("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.0" not in name and "query.bias" not in name)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    _, _, plain = gradients(model, pad_rows(rows, kind="bert"), labels)
    batch = packed(rows, fuse(model, first_only=True))
    _, _, ours = gradients(model, batch, labels)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert largest_difference(plain, ours) < 1e-5


def test_padded_batches_and_unfused_model_are_unchanged() -> None:
    model = make_model("bert")
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    before = gradients(model, pad_rows(rows, kind="bert"), labels)[1]
    strategy = PaddingFree(model)
    fused = fuse_layers(model, torch.bfloat16, first_token_only=True)
    assert torch.equal(gradients(model, pad_rows(rows, kind="bert"), labels)[1], before)
    fused.disable()
    FirstTokenOnly(model)
    assert torch.allclose(gradients(model, packed(rows, strategy), labels)[1], before, atol=2e-6)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_dropout_changes_with_the_seed_and_repeats_with_it(kind: str) -> None:
    model = make_model(kind, dropout=0.3)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    batch = packed(rows, fuse(model, first_only=kind == "bert"))
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(gradients(model, batch, labels)[0])
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize(
    ("kind", "option", "reason"),
    [
        ("albert", {}, "share one set"),
        ("modernbert", {"mlp_bias": True}, "its projections have biases"),
        ("modernbert", {"attention_bias": True}, "its projections have biases"),
        ("modernbert", {"hidden_activation": "relu"}, "its activation is relu, not gelu"),
    ],
)
def test_unsupported_architectures_report_why_not_fused(kind: str, option: dict[str, Any], reason: str) -> None:
    assert reason in (why_not_fused(make_model(kind, **option)) or "")


def test_unknown_activations_and_wrapped_layers_stay_unfused() -> None:
    model = make_model("bert")
    other = copy.deepcopy(model.config)
    other.hidden_act = "relu"
    assert "relu" in (why_not_fused(type(model)(other)) or "")
    model.bert.encoder.layer[0].intermediate.dense = nn.Sequential(model.bert.encoder.layer[0].intermediate.dense)
    assert "intermediate.dense is torch.nn.modules.container.Sequential" in (why_not_fused(model) or "")


def scaled(*values: Any) -> Any:
    """Return the values with each tensor multiplied by 1.5."""
    return tuple(v * 1.5 if isinstance(v, torch.Tensor) else v for v in values)


LISTENERS: dict[str, Any] = {
    "forward": lambda m: m.register_forward_hook(lambda _, a, o: o * 1.5),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, a: scaled(*a)),
    "full backward": lambda m: m.register_full_backward_hook(lambda _, gi, go: scaled(*gi)),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, go: scaled(*go)),
}
FIRST = "bert.encoder.layer.0."
LISTENED = [
    *itertools.product(["bert"], LISTENERS, (f"{FIRST}output.dense", f"{FIRST}attention.self.query", f"{FIRST}intermediate")),
    *itertools.product(["modernbert"], ["forward"], ("model.layers.1.mlp_norm", "model.final_norm", "model.embeddings.norm")),
    ("modernbert", "full backward", "model.layers.0.attn.Wqkv"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind", "place"), LISTENED)
def test_hooks_on_fused_layer_parts_are_called(family: str, kind: str, place: str) -> None:
    plain, ours = make_model(family), make_model(family)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    batch = packed(rows, fuse(ours, first_only=family == "bert"))
    before = gradients(ours, batch, labels)
    handles = [LISTENERS[kind](m.get_submodule(place)) for m in (plain, ours)]
    expected, found = gradients(plain, pad_rows(rows, kind=family), labels), gradients(ours, batch, labels)
    assert largest_difference(expected[2], found[2]) < 2e-5
    assert largest_difference(before[2], found[2]) > 1e-3
    handles[1].remove()
    assert largest_difference(before[2], gradients(ours, batch, labels)[2]) == 0.0


def test_global_hooks_are_called_after_fusing() -> None:
    from torch.nn.modules.module import register_module_forward_pre_hook

    plain, ours = make_model("bert"), make_model("bert")
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    batch = packed(rows, fuse(ours, first_only=True))
    handle = register_module_forward_pre_hook(lambda m, a: scaled(*a) if type(m).__name__ == "BertOutput" else None)
    try:
        expected, found = gradients(plain, pad_rows(rows, kind="bert"), labels), gradients(ours, batch, labels)
    finally:
        handle.remove()
    assert largest_difference(expected[2], found[2]) < 2e-5


WRITES: dict[str, Any] = {
    "another tensor": lambda p: setattr(p, "data", p.data * 1.5),
    "in place": lambda p: p.data.mul_(1.5),
    "moved": lambda p: setattr(p, "data", p.data.to(torch.float64).mul(1.5).to(torch.float32)),
}


# Writes in place can't be detected: only the optimizer may update copies, if nothing else writes weights.
KEPT = [(name, True) for name in WRITES if name != "in place"]


@pytest.mark.parametrize(("write", "fresh"), [*((name, False) for name in WRITES), *KEPT])
def test_weights_written_through_data_are_used(write: str, fresh: bool) -> None:
    plain, ours = make_model("bert"), make_model("bert")
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    strategy = PaddingFree(ours)
    fused = fuse_layers(ours, torch.float32, first_token_only=True)
    batch = packed(rows, strategy)
    fused.kept_fresh = fresh
    gradients(ours, batch, labels)
    for model in (plain, ours):
        layer = model.bert.encoder.layer[0]
        for module in (layer.attention.self.key, layer.output.dense, layer.output.LayerNorm):
            for parameter in module.parameters():
                WRITES[write](parameter)
    expected, found = gradients(plain, pad_rows(rows, kind="bert"), labels), gradients(ours, batch, labels)
    assert abs(expected[0] - found[0]) < 1e-6
    assert largest_difference(expected[2], found[2]) < 2e-5


def test_changed_dropout_and_attention_scale_are_used() -> None:
    plain, ours = make_model("bert"), make_model("bert", dropout=0.4)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    batch = packed(rows, fuse(ours, first_only=True))
    for model in (plain, ours):
        model.bert.encoder.layer[1].attention.self.scaling = 0.1
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    expected, found = gradients(plain, pad_rows(rows, kind="bert"), labels), gradients(ours, batch, labels)
    assert largest_difference(expected[2], found[2]) < 2e-5


@pytest.mark.parametrize("share", ["layers", "weights"])
def test_layers_that_share_modules_or_weights_are_not_fused(share: str) -> None:
    model = make_model("bert")
    layers = model.bert.encoder.layer
    if share == "layers":
        layers[1] = layers[0]
    else:
        layers[1].output.dense.weight = layers[0].output.dense.weight
    assert why_not_fused(model) == "its layers share parameters"


@pytest.mark.parametrize("bias", [False, True])
def test_modernbert_is_fused_and_restored(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("modernbert", norm_bias=bias)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norm weights of ones and zeros would hide errors
            nn.init.normal_(parameter, 1.0, 0.3)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    plain = gradients(model, pad_rows(rows, kind="modernbert"), labels)
    strategy = PaddingFree(model)
    before = gradients(model, packed(rows, strategy), labels)
    fused = fuse_layers(model, torch.float32, first_token_only=False)
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    kind, calls = type(layers[0]), list[nn.Module]()
    own = kind.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)
    ours = gradients(model, packed(rows, strategy), labels)
    assert calls == []
    assert abs(plain[0] - ours[0]) < 1e-6
    assert largest_difference(plain[2], ours[2]) < 1e-5
    assert torch.equal(gradients(model, pad_rows(rows, kind="modernbert"), labels)[1], plain[1])
    fused.disable()
    assert largest_difference(before[2], gradients(model, packed(rows, strategy), labels)[2]) == 0.0
    assert len(calls) == 2 * len(layers)


def test_modernbert_uses_changed_weights_and_dropout() -> None:
    plain, ours = make_model("modernbert"), make_model("modernbert", dropout=0.4)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    batch = packed(rows, fuse(ours, first_only=False))
    gradients(ours, batch, labels)
    for model in (plain, ours):
        layers: Any = model.get_submodule("model.layers")
        for module in (layers[0].attn.Wqkv, layers[1].mlp.Wo, layers[1].mlp_norm):
            module.weight.data.mul_(1.5)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for layer in layers:
            layer.attn.attention_dropout = 0.0
    expected, found = gradients(plain, pad_rows(rows, kind="modernbert"), labels), gradients(ours, batch, labels)
    assert largest_difference(expected[2], found[2]) < 2e-5
