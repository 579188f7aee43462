"""A packed batch has the loss, gradients and weights of the padded one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equivalence.strategy_cases import (
    CUT_FAMILIES,
    FAMILIES,
    MANY_STEPS,
    PAD,
    RAGGED,
    RELATIVE,
    assert_same_step,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from sampling import crossed
from tunesmith.models.families import why_not
from tunesmith.speedups import packing
from tunesmith.speedups.packing import FirstTokenOnly, PaddingFree, pack, why_not_first_token

SHAPES = {"ragged": RAGGED, "one row": (7,), "one token": (1,), "all of one token": (1, 1, 1), "equal": (6, 6, 6, 6)}


def packed(rows: dict[str, list[np.ndarray]], strategy: PaddingFree, **options: Any) -> dict[str, Any]:
    return pack(rows, first_position=strategy.first_position, keys=strategy.keys, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "first_only"), [*((kind, False) for kind in FAMILIES), *((kind, True) for kind in CUT_FAMILIES)]
)
def test_packed_loss_logits_and_gradients_match_padded(kind: str, first_only: bool, shape: str) -> None:
    model = make_model(kind)
    rows, labels = make_rows(SHAPES[shape], pad=PAD.get(kind, 0)), make_labels(len(SHAPES[shape]))
    plain = gradients(model, pad_rows(rows, kind=kind), labels)
    strategy = PaddingFree(model)
    if first_only:
        FirstTokenOnly(model)
    assert_same_step(plain, gradients(model, packed(rows, strategy), labels))


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", *RELATIVE])
def test_batch_filled_up_to_a_bucket_changes_nothing(kind: str, first_only: bool) -> None:
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    plain = gradients(model, pad_rows(rows, kind=kind), labels)
    strategy = PaddingFree(model)
    if first_only:
        FirstTokenOnly(model)
    for total in (sum(RAGGED) + 1, 64, 77):
        batch = packed(rows, strategy, total=total, longest=30)
        assert batch["input_ids"].shape == (1, total)
        assert len(batch["layout"].lengths) == len(RAGGED) + 1
        assert_same_step(plain, gradients(model, batch, labels))


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("kind", ["bert", *RELATIVE])
def test_attention_for_other_devices_equals_plain_step(
    kind: str, first_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "GROUPED", ())
    monkeypatch.setattr(packing, "attend_on_cpu", packing.attend_by_padding)
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    plain = gradients(model, pad_rows(rows, kind=kind), labels)
    strategy = PaddingFree(model)
    if first_only:
        FirstTokenOnly(model)
    assert_same_step(plain, gradients(model, packed(rows, strategy, total=64, longest=30), labels))


def train(model: nn.Module, batches: list[tuple[dict[str, Any], torch.Tensor]], rate: float) -> dict[str, torch.Tensor]:
    """Return the parameters after one AdamW step per batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    for batch, labels in batches:
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# In float32, Adam amplifies rounding errors of gradients that are zero in theory (key biases) to steps of about the
# learning rate, so float32 uses the usual rate; float64 shows that results are equal at any rate.
@pytest.mark.parametrize("steps", MANY_STEPS)
@pytest.mark.parametrize(
    ("kind", "dtype", "rate", "tolerance"),
    crossed(FAMILIES, [(torch.float32, 5e-5, 1e-4), (torch.float64, 1e-3, 1e-8)]),
)
def test_weights_after_many_steps_equal_plain_training(
    kind: str, dtype: torch.dtype, rate: float, tolerance: float, steps: int
) -> None:
    plain = make_model(kind).to(dtype)
    ours = copy.deepcopy(plain)
    strategy = PaddingFree(ours)
    if kind in CUT_FAMILIES:
        FirstTokenOnly(ours)
    lengths = np.random.default_rng(3).integers(1, 20, (steps, 6))
    rows = [make_rows(n, seed=i, pad=PAD.get(kind, 0)) for i, n in enumerate(lengths)]
    labels = [make_labels(6, seed=i) for i in range(steps)]
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    expected = train(plain, [(pad_rows(r, kind=kind), y) for r, y in zip(rows, labels, strict=True)], rate)
    found = train(ours, [(packed(r, strategy), y) for r, y in zip(rows, labels, strict=True)], rate)
    assert largest_difference(start, expected) > 20 * rate
    assert largest_difference(expected, found) < tolerance


def test_mean_loss_with_dropout_matches_over_many_seeds() -> None:
    model = make_model("bert", dropout=0.2)
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    quiet = copy.deepcopy(model).eval()

    def losses(batch: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return torch.stack([model(**batch, labels=labels).loss for _ in range(400)]).double()

    plain = losses(pad_rows(rows, kind="bert"))
    strategy = PaddingFree(model)
    ours = losses(packed(rows, strategy))
    error = float((plain.var() / 400 + ours.var() / 400).sqrt())
    assert abs(float(plain.mean() - ours.mean())) < 4 * error
    assert 0.8 < float(plain.std() / ours.std()) < 1.25
    without = float(quiet(**pad_rows(rows, kind="bert"), labels=labels).loss.detach())
    assert abs(without - float(plain.mean())) > 4 * error, "the test must detect missing dropout"


def test_deberta_loss_without_problem_type_matches_when_packed() -> None:
    model = make_model("deberta-v2")
    model.config.problem_type = None
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    plain = gradients(model, pad_rows(rows, kind="deberta-v2"), labels)
    batch = packed(rows, PaddingFree(model))
    assert_same_step(plain, gradients(model, batch, labels))
    assert model.config.problem_type is None


@pytest.mark.parametrize("kind", RELATIVE)
def test_gradients_after_same_length_prediction_are_correct(kind: str) -> None:
    model = make_model(kind)
    rows, labels = make_rows(RAGGED, pad=PAD.get(kind, 0)), make_labels(len(RAGGED))
    batch = packed(rows, PaddingFree(model))
    with torch.inference_mode():
        before = model(**batch).logits
    assert torch.allclose(gradients(model, batch, labels)[1], before, atol=1e-6)


def test_padded_batches_work_and_disable_restores_model() -> None:
    model = make_model("bert")
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    before = model.config._attn_implementation
    plain = gradients(model, pad_rows(rows, kind="bert"), labels)
    strategy = PaddingFree(model)
    assert_same_step(plain, gradients(model, pad_rows(rows, kind="bert"), labels), tolerance=1e-6)
    assert "tunesmith" not in model.config.to_json_string()
    strategy.disable()
    assert model.config._attn_implementation == before
    assert not model.bert.encoder._forward_hooks


def test_gradient_checkpointing_repeats_the_same_dropout() -> None:
    rows, labels = make_rows(RAGGED), make_labels(len(RAGGED))
    found = []
    for checkpointing in (False, True):
        model = make_model("bert", dropout=0.3)
        strategy = PaddingFree(model)
        FirstTokenOnly(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(5)
        found.append(gradients(model, packed(rows, strategy), labels)[2])
    assert largest_difference(*found) < 1e-6


def test_unsupported_models_report_the_reason() -> None:
    import transformers

    config = transformers.AutoConfig.for_model("xlnet", vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    assert "no description of its parts is known" in str(why_not(model))
    assert "share" in str(why_not_first_token(make_model("albert")))


def test_last_feed_forward_computes_only_first_tokens() -> None:
    model = make_model("bert", layers=3)
    seen: dict[int, tuple[int, ...]] = {}
    strategy = PaddingFree(model)
    FirstTokenOnly(model)
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.intermediate.register_forward_hook(lambda m, a, o, n=number: seen.__setitem__(n, tuple(o.shape[:2])))
    model(**packed(make_rows(RAGGED), strategy))
    assert seen == {0: (1, sum(RAGGED)), 1: (1, sum(RAGGED)), 2: (1, len(RAGGED))}


@pytest.mark.parametrize("kind", CUT_FAMILIES)
def test_padded_call_by_user_returns_all_tokens(kind: str) -> None:
    model = make_model(kind).eval()
    batch = pad_rows(make_rows(RAGGED, pad=PAD.get(kind, 0)), kind=kind)
    with torch.no_grad():
        plain = model.base_model(**batch).last_hidden_state
        PaddingFree(model)
        FirstTokenOnly(model)
        found = model.base_model(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert found.shape == plain.shape
    assert torch.allclose(found[real], plain[real], atol=1e-5)


@pytest.mark.parametrize("order", ["packing first", "cut first"])
def test_strategies_can_be_removed_in_any_order(order: str) -> None:
    model = make_model("bert")
    before = model.config._attn_implementation
    speedups = [PaddingFree(model), FirstTokenOnly(model)]
    for strategy in speedups if order == "packing first" else reversed(speedups):
        strategy.disable()
    assert model.config._attn_implementation == before
