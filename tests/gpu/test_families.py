"""Losses match transformers for architectures with custom attention, captured, and for encoders without speedups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from gpu_trainer import Uncaptured, apart, replayed, run, weights_apart

from tunesmith import Trainer

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


@pytest.mark.parametrize("kind", KINDS)
def test_float32_steps_match_transformers(tmp_path: Path, kind: str) -> None:
    ours, theirs = (
        run(trainer, tmp_path / trainer.__module__, config_of(kind, 0.0)) for trainer in (Trainer, transformers.Trainer)
    )
    assert replayed(ours) > 0
    found = {n: apart(ours, theirs, n) for n in ("loss", "grad_norm", "learning_rate", "eval_loss")}
    found["weights"] = weights_apart(ours, theirs)
    print(kind, found)
    limits = {"loss": 1e-5, "grad_norm": 1e-4, "learning_rate": 1e-12, "eval_loss": 1e-5, "weights": 1e-4}
    assert {n: v for n, v in found.items() if not v < limits[n]} == {}


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
