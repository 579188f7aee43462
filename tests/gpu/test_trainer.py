"""The Trainer's captured steps: transformers.Trainer's losses in float32; in bf16 with dropout the same bits again."""

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
    """A finished Trainer of two layers of BERT."""
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    return gpu_trainer.run(kind, folder, config, **options)


@pytest.mark.parametrize(("accumulation", "peer"), [(1, transformers.Trainer), (2, transformers.Trainer)])
def test_float32_steps_are_those_of_the_peer(tmp_path: Path, accumulation: int, peer: Any) -> None:
    ours, theirs = (
        run(kind, tmp_path / kind.__module__, 0.0, gradient_accumulation_steps=accumulation) for kind in (Trainer, peer)
    )
    assert replayed(ours) > 0
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs) < 1e-4


@pytest.mark.parametrize(("optim", "rate"), [("adamw_torch", 5e-5), ("sgd", 1e-2), ("adafactor", 1e-4)])
def test_other_optimizers_take_the_steps_of_the_peer(tmp_path: Path, optim: str, rate: float) -> None:
    """A bias of all keys moves no attention: its gradient is rounding alone, which Adafactor divides by its own size.

    Two runs of transformers that differ by 1e-7 in one weight are 0.0013 apart there, and 2e-7 everywhere else.
    """
    kinds = (Trainer, transformers.Trainer)
    ours, theirs = (run(kind, tmp_path / kind.__module__, 0.0, optim=optim, learning_rate=rate) for kind in kinds)
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs, but="key.bias" if optim == "adafactor" else "no name") < 1e-4


def test_bf16_steps_with_dropout_have_the_same_bits_uncaptured_and_resumed(tmp_path: Path) -> None:
    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 37}
    one = run(Trainer, tmp_path / "one", 0.1, **saving)
    assert replayed(one) > 0
    eager = run(Uncaptured, tmp_path / "eager", 0.1, bf16=True)
    again = run(Trainer, tmp_path / "again", 0.1, resume=str(tmp_path / "one" / "checkpoint-37"), **saving)
    for other in (eager, again):
        assert apart(one, other, "loss") == 0
        assert weights_apart(one, other) == 0


def test_a_model_made_by_model_init_is_fused_and_captured_on_the_device(tmp_path: Path) -> None:
    """Speed-ups are chosen when it is there already: its copies in half precision lie beside the weights."""

    class Initialised(Trainer):
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

    given, made = (run(kind, tmp_path / kind.__name__, 0.0, bf16=True) for kind in (Trainer, Initialised))
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (given, made)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == STEPS
