"""The Trainer's losses match transformers: CUDA graphs of several architectures, optimizers, and encoders without speedups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers
from gpu_trainer import STEPS, Uncaptured, apart, replayed, run, weights_apart

from tunesmith import Trainer
from tunesmith.speedups import verify

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
}
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, "pooler_hidden_act": "gelu",
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "mpnet": ("mpnet", {"vocab_size": 30527}),
    "deberta-v2": ("deberta-v2", {"vocab_size": 30522, **DEBERTA}),
    "modernbert": ("modernbert", {"classifier_pooling": "cls", "local_attention": 32}),
    "modernbert-mean": ("modernbert", {"classifier_pooling": "mean", "local_attention": 32}),
    "ernie": ("ernie", {"vocab_size": 30522}),
}
"""No speedup supports ERNIE: its steps are padded, and bit-identical only with `full_determinism`."""
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
"""transformers 5.17 calls `torch.jit.script` when DeBERTa is imported."""


def config_of(kind: str, dropout: float) -> Any:
    """Return the configuration of a model with two layers of base width."""
    name, sizes = KINDS[kind]
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout")
    if name == "modernbert":
        names = ("embedding_dropout", "mlp_dropout", "attention_dropout", "classifier_dropout")
    given = {**SIZES, **sizes, **dict.fromkeys(names, dropout)}
    return transformers.AutoConfig.for_model(name, num_labels=2, **given)


@pytest.mark.parametrize(("kind", "accumulation"), [*((kind, 1) for kind in KINDS), ("bert", 2)])
def test_float32_steps_match_transformers(tmp_path: Path, kind: str, accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    ours, theirs, padded = (
        run(trainer, tmp_path / name, config_of(kind, 0.0), width, **options)
        for name, trainer, width in (
            ("ours", Trainer, None), ("theirs", transformers.Trainer, None), ("padded", transformers.Trainer, 32)
        )
    )  # fmt: skip
    assert replayed(ours) > 0
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found, rounding = ({n: apart(one, theirs, n) for n in names} for one in (ours, padded))
    found["weights"], rounding["weights"] = weights_apart(ours, theirs), weights_apart(padded, theirs)
    print(kind, found, rounding)
    limits = {"loss": 1e-5, "grad_norm": 1e-4, "learning_rate": 1e-12, "eval_loss": 1e-5, "weights": 1e-4}
    # More padding changes only rounding, which training amplifies. Packing changes it about three times as much.
    assert {n: v for n, v in found.items() if not v < max(limits[n], 6 * rounding[n])} == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ernie"])
def test_bf16_losses_are_bit_identical_uncaptured_and_resumed(tmp_path: Path, kind: str) -> None:
    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 37}
    one = run(Trainer, tmp_path / "one", config_of(kind, 0.1), **saving)
    assert replayed(one) > 0
    eager = run(Uncaptured, tmp_path / "eager", config_of(kind, 0.1), bf16=True)
    resume = str(tmp_path / "one" / "checkpoint-37")
    again = run(Trainer, tmp_path / "again", config_of(kind, 0.1), resume=resume, **saving)
    found = {n: (apart(one, t, "loss"), weights_apart(one, t)) for n, t in (("eager", eager), ("again", again))}
    print(kind, found)
    assert found == {"eager": (0, 0), "again": (0, 0)}


def test_callback_of_the_user_does_not_repeat_the_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[Any]()
    find = verify._find_wrong
    monkeypatch.setattr(verify, "_find_wrong", lambda *args, **options: compared.append(args) or find(*args, **options))

    class WithCallback(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, callbacks=[type("Own", (transformers.TrainerCallback,), {})()], **options)

    plain = run(Trainer, tmp_path / "plain", config_of("bert", 0.1), bf16=True)
    del compared[:]
    trainer = run(WithCallback, tmp_path / "own", config_of("bert", 0.1), bf16=True)
    assert len(compared) == 1
    assert apart(plain, trainer, "loss") == 0


def test_encoder_that_reads_from_device_is_not_captured(tmp_path: Path) -> None:
    """Funnel reads values from the device to compute positions, which a capture doesn't allow."""
    config = transformers.FunnelConfig(
        vocab_size=30522, block_sizes=[1, 1], num_decoder_layers=1, d_model=128, n_head=4, d_head=32, d_inner=256,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, num_labels=2,
    )  # fmt: skip
    ours, theirs = (run(t, tmp_path / t.__module__, config, max_steps=20) for t in (Trainer, transformers.Trainer))
    assert replayed(ours) == 0
    assert apart(ours, theirs, "loss") < 1e-5


def test_encoder_that_draws_on_host_is_not_captured(tmp_path: Path) -> None:
    """BART skips random layers: a replay would always skip the same ones."""
    config = transformers.BartConfig(
        vocab_size=30522, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, encoder_layerdrop=0.5, num_labels=2,
        eos_token_id=102, pad_token_id=0, max_position_embeddings=256,
    )  # fmt: skip
    trainer = run(Trainer, tmp_path, config, max_steps=20)
    assert replayed(trainer) == 0
    assert trainer.state.global_step == 20


@pytest.mark.parametrize(("optim", "rate"), [("adamw_torch", 5e-5), ("sgd", 1e-2), ("adafactor", 1e-4)])
def test_each_optimizer_matches_transformers(tmp_path: Path, optim: str, rate: float) -> None:
    """The key bias doesn't affect attention: its gradient is only rounding error, which Adafactor normalizes.

    If one weight differs by 1e-7, two transformers runs differ by 0.0013 in this bias and by 2e-7 elsewhere.
    """
    kinds = (Trainer, transformers.Trainer)
    ours, theirs = (
        run(kind, tmp_path / kind.__module__, config_of("bert", 0.0), optim=optim, learning_rate=rate) for kind in kinds
    )
    for number, limit in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-12), ("eval_loss", 1e-5)):
        assert apart(ours, theirs, number) < limit, number
    assert weights_apart(ours, theirs, but="key.bias" if optim == "adafactor" else "no name") < 1e-4


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

    given, made = (
        run(kind, tmp_path / kind.__name__, config_of("bert", 0.0), bf16=True) for kind in (Trainer, FromModelInit)
    )
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (given, made)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == STEPS
