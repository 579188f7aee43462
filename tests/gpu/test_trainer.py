"""Captured steps of the Trainer match transformers in float32, and are reproducible in bf16 with dropout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gpu_trainer
import pytest
import transformers
from gpu_trainer import STEPS, Uncaptured, apart, replayed, weights_apart

from tunesmith import Trainer


def run(kind: Any, folder: Path, dropout: float, **options: Any) -> Any:
    """Train two layers of BERT and return the Trainer."""
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    return gpu_trainer.run(kind, folder, config, **options)


@pytest.mark.parametrize(("accumulation", "peer"), [(1, transformers.Trainer), (2, transformers.Trainer)])
def test_float32_steps_match_transformers(tmp_path: Path, accumulation: int, peer: Any) -> None:
    ours, theirs = (
        run(kind, tmp_path / kind.__module__, 0.0, gradient_accumulation_steps=accumulation) for kind in (Trainer, peer)
    )
    assert replayed(ours) > 0
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs) < 1e-4


@pytest.mark.parametrize(("optim", "rate"), [("adamw_torch", 5e-5), ("sgd", 1e-2), ("adafactor", 1e-4)])
def test_each_optimizer_matches_transformers(tmp_path: Path, optim: str, rate: float) -> None:
    """The key bias doesn't affect attention: its gradient is only rounding error, which Adafactor normalizes.

    If one weight differs by 1e-7, two transformers runs differ by 0.0013 in this bias and by 2e-7 elsewhere.
    """
    kinds = (Trainer, transformers.Trainer)
    ours, theirs = (run(kind, tmp_path / kind.__module__, 0.0, optim=optim, learning_rate=rate) for kind in kinds)
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs, but="key.bias" if optim == "adafactor" else "no name") < 1e-4


def test_bf16_losses_are_bit_identical_uncaptured_and_resumed(tmp_path: Path) -> None:
    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 37}
    one = run(Trainer, tmp_path / "one", 0.1, **saving)
    assert replayed(one) > 0
    eager = run(Uncaptured, tmp_path / "eager", 0.1, bf16=True)
    again = run(Trainer, tmp_path / "again", 0.1, resume=str(tmp_path / "one" / "checkpoint-37"), **saving)
    for other in (eager, again):
        assert apart(one, other, "loss") == 0
        assert weights_apart(one, other) == 0


def test_model_from_model_init_is_fused_and_captured(tmp_path: Path) -> None:
    """Speedups are applied after the model is on the device: its half-precision copies are next to the weights."""

    class FromModelInit(Trainer):
        def __init__(self, model: Any, *given: Any, **options: Any) -> None:
            super().__init__(None, *given, model_init=lambda: copy.deepcopy(model), **options)

        def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
            prepared = super()._prepare_for_training(*args, **options)
            assert self._captured is not None
            chosen = self._captured.speedups
            assert chosen.fused is not None
            assert {t.device.type for t in chosen.fused.copies.values()} == {"cuda"}
            assert chosen.graphs is not None
            return prepared

    given, made = (run(kind, tmp_path / kind.__name__, 0.0, bf16=True) for kind in (Trainer, FromModelInit))
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (given, made)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == STEPS
