"""Ensembles, soups and the choice of what is deployed: planted predictions whose right answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tunesmith.labels import Task
from tunesmith.metrics.calibration import fit_temperature, log_loss_of
from tunesmith.tuning.blending import HeldOut, compare_held_out, greedy_weights, mix_answers, shown_worse
from tunesmith.tuning.chosen import _best, scale_head, stir_in
from tunesmith.tuning.variants import Variant


def planted(seed: int, right: float, n: int = 400, scale: float = 3.0) -> HeldOut:
    """Two classes; a model that is right in so many rows, each row by a draw of its own."""
    rng = np.random.default_rng(99)
    gold = rng.integers(0, 2, n)
    hit = np.random.default_rng(seed).random(n) < right
    side = np.where(hit, gold, 1 - gold)
    logits = np.zeros((n, 2))
    logits[np.arange(n), side] = scale
    return HeldOut(Task.BINARY, logits, gold, ("bad", "good"))


def test_the_greedy_ensemble_takes_what_helps_and_leaves_the_rest() -> None:
    members = {"a": planted(1, 0.8), "b": planted(2, 0.8), "c": planted(3, 0.8), "coin": planted(4, 0.5)}
    weights = greedy_weights(members, "accuracy")
    assert set(weights) == {"a", "b", "c"}
    assert sum(weights.values()) == pytest.approx(1)
    mixed = mix_answers([members[name] for name in weights], list(weights.values()))
    assert mixed.score("accuracy") > max(one.score("accuracy") for one in members.values())


def test_a_model_that_is_worse_is_not_deployed() -> None:
    good, equal, bad = planted(1, 0.85), planted(1, 0.85, scale=2.0), planted(1, 0.6)
    assert shown_worse(compare_held_out(good, bad, "accuracy"), good, bad)
    assert not shown_worse(compare_held_out(good, equal, "accuracy"), good, equal)
    assert not shown_worse(compare_held_out(bad, good, "accuracy"), bad, good)


def test_what_is_expected_to_be_better_is_deployed_unless_held_out_rows_show_it_worse() -> None:
    held = {
        "auto": planted(1, 0.80),
        "equal": planted(2, 0.79, scale=2.0),
        "behind": planted(2, 0.79),
        "bad": planted(3, 0.6),
    }
    plain, equal, behind, bad = (Variant(name, "", expected=name != "auto") for name in held)
    assert _best([plain, equal], held, "accuracy") is equal
    assert _best([plain, behind], held, "accuracy") is plain  # score and loss both
    assert _best([plain, bad], held, "accuracy") is plain
    assert _best([plain, Variant("equal", "")], held, "accuracy") is plain


def test_a_temperature_is_found_and_one_without_gain_is_not_kept() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=(3000, 4)) * 1.5
    odds = np.exp(true) / np.exp(true).sum(axis=1, keepdims=True)
    gold = np.array([rng.choice(4, p=row) for row in odds])
    found = fit_temperature(true * 3.0, gold, Task.MULTICLASS)
    assert found is not None
    assert found.value == pytest.approx(3.0, rel=0.1)
    assert found.error_after < 0.03 < found.error_before
    assert log_loss_of(true * 3.0 / found.value, gold) < log_loss_of(true * 3.0, gold)
    assert fit_temperature(true[:20], gold[:20], Task.MULTICLASS) is None
    assert fit_temperature(true[:, 0], gold.astype(float), Task.REGRESSION) is None
    several = (rng.random((3000, 4)) < 1 / (1 + np.exp(-true))).astype(int)
    found = fit_temperature(true * 2.0, several, Task.MULTILABEL)
    assert found is not None
    assert found.value == pytest.approx(2.0, rel=0.1)


def test_a_soup_is_the_weighted_mean_and_a_temperature_divides_the_logits(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torch.nn.Linear(3, 2)

    model: Any = Head()
    (tmp_path / "other").mkdir()
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    save_file(other, tmp_path / "other" / "model.safetensors")
    own = {name: value.clone() for name, value in model.state_dict().items()}
    stir_in(model, {tmp_path / "other": 0.25})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, 0.75 * own[name] + 0.25 * other[name])
    rows = torch.randn(5, 3)
    before = model.classifier(rows)
    scale_head(model, 2.0)
    torch.testing.assert_close(model.classifier(rows), before / 2)
