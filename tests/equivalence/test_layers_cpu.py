"""Layers written out for the CPU give the loss, gradients and weights of the layers as transformers wrote them."""

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
    RELATIVE,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.data.batches import Padding
from tunesmith.errors import ConfigError
from tunesmith.speedups import cpu_speed, layers_cpu, packed_cpu
from tunesmith.speedups.packing import pack
from tunesmith.speedups.padding_free import enable_padding_free
from tunesmith.speedups.strategies import choose_strategies

LIKE_BERT = tuple(kind for kind in CUT_FAMILIES if kind not in RELATIVE)
CPU = torch.device("cpu")


class Quick:
    """A model with the layers in place; how many of them have run."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, first_only: bool = True) -> None:
        self.model, self._strategy, self.layers = model, enable_padding_free(model), 0
        self.stack = layers_cpu.CpuLayers(model, torch.float32, first_token_only=first_only)
        own = layers_cpu.run_layer

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.layers += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(layers_cpu, "run_layer", counted)

    def batch(self, rows: dict[str, list[np.ndarray]]) -> dict[str, Any]:
        return pack(rows, first_position=self._strategy.first_position, keys=self._strategy.keys)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("kind", "first_only"), [*itertools.product(LIKE_BERT, (False, True))])
def test_loss_logits_and_gradients_equal_the_padded_ones(
    kind: str, first_only: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(cpu_speed, "_ENOUGH_PRODUCTS", 0)
        monkeypatch.setattr(cpu_speed, "_ENOUGH_ROWS", 0)
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    loss, logits, plain = gradients(model, pad_rows(rows, kind=kind), labels)
    quick = Quick(model, monkeypatch, first_only=first_only)
    ours_loss, ours_logits, ours = gradients(model, quick.batch(rows), labels)
    assert quick.layers == 2
    assert abs(loss - ours_loss) < 1e-6
    assert torch.allclose(logits, ours_logits, atol=2e-6)
    assert largest_difference(plain, ours) < 1e-5


@pytest.mark.parametrize("steps", MANY_STEPS)
@pytest.mark.parametrize("kind", LIKE_BERT)
def test_weights_after_many_steps_equal_plain_training(kind: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_model(kind)
    quick = Quick(copy.deepcopy(plain), monkeypatch)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=5e-5, weight_decay=0.1) for m in (plain, quick.model)]
    for step in range(steps):
        rows = make_rows(np.random.default_rng(step).integers(1, 20, 6), seed=step, pad=PAD.get(kind, 0))
        labels = make_labels(6, seed=step)
        for model, optimizer, batch in zip(
            (plain, quick.model), optimizers, (pad_rows(rows, kind=kind), quick.batch(rows)), strict=True
        ):
            optimizer.zero_grad()
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
    for (name, a), b in zip(plain.named_parameters(), quick.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


@pytest.mark.parametrize("frozen", ["embeddings", "layer.0.", "layer.1.", "bias", "query", "value.weight", "LayerNorm"])
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    _, _, plain = gradients(model, pad_rows(rows, kind="bert"), labels)
    quick = Quick(model, monkeypatch)
    _, _, ours = gradients(model, quick.batch(rows), labels)
    assert quick.layers == 2
    assert plain.keys() == ours.keys()
    assert largest_difference(plain, ours) < 1e-5


def test_dropped_values_are_those_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer draws its masks together, in the order in which the modules draw theirs: first tokens alone have other sizes."""
    monkeypatch.setattr(cpu_speed, "_ENOUGH_VALUES", 0)
    rows, labels, found = make_rows(RAGGED), make_labels(len(RAGGED)), []
    drawn, place = cpu_speed.draw_keep_mask(100_000, 0.3), 0

    def next_of_them(size: int, drop: float) -> torch.Tensor:
        nonlocal place
        place += size
        return drawn[place - size : place].clone()

    for module in (cpu_speed, packed_cpu):
        monkeypatch.setattr(module, "draw_keep_mask", next_of_them)
    for written_out in (False, True):
        model = make_model("bert", dropout=0.3)
        quick = Quick(model, monkeypatch, first_only=False)
        cpu_speed.enable_cpu_speed(model)
        if not written_out:
            quick.stack.disable()
        place = 0
        found.append(gradients(model, quick.batch(rows), labels))
        assert quick.layers == (2 if written_out else 0)
        assert 0 < place < len(drawn)
    assert abs(found[0][0] - found[1][0]) < 1e-6
    assert largest_difference(found[0][2], found[1][2]) < 1e-5


def test_the_mean_gradient_with_dropout_is_that_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = make_rows((5, 9, 3, 7)), make_labels(4)
    model = make_model("bert", dropout=0.1)
    quick = Quick(model, monkeypatch)
    batch, draws = quick.batch(rows), 400
    means = []
    for written_out in (False, True):
        quick.stack.enable() if written_out else quick.stack.disable()
        torch.manual_seed(1)
        drawn = [gradients(model, batch, labels)[2] for _ in range(draws)]
        means.append({n: torch.stack([d[n] for d in drawn]) for n in drawn[0]})
    for name in means[0]:
        theirs, ours = (m[name].double().flatten(1) for m in means)
        error = ((theirs.var(0) + ours.var(0)) / draws).sum().sqrt()
        assert (theirs.mean(0) - ours.mean(0)).norm() < 2 * error + 1e-7, name


@pytest.mark.parametrize("how", ["hook", "no gradient", "padded", "double", "disabled"])
def test_what_they_are_not_for_runs_as_transformers_wrote_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("bert")
    quick = Quick(model, monkeypatch)
    rows = make_rows(RAGGED)
    batch = pad_rows(rows, kind="bert") if how == "padded" else quick.batch(rows)
    if how == "hook":
        model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    if how == "double":
        model.double()
    if how == "disabled":
        quick.stack.disable()
    with torch.set_grad_enabled(how != "no gradient"):
        logits = model(**batch).logits
    assert quick.layers == 0
    assert logits.shape == (len(RAGGED), 3)


@pytest.mark.parametrize(("kind", "precision"), [("mpnet", "no"), ("modernbert", "no"), ("bert", "bf16")])
def test_they_are_refused_where_they_do_not_fit(kind: str, precision: Any) -> None:
    with pytest.raises(ConfigError, match="--fused_layers on is not possible: on a CPU they are for"):
        choose_strategies(make_model(kind), None, Padding(), device=CPU, precision=precision, fused_layers="on")
