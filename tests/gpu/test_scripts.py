"""Customized scripts on a GPU: the encoder runs as CUDA graphs, and losses match transformers.

The logic is tested on a CPU with a stand-in (tests/unit/speedups/test_model_graphs.py). These tests need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import scripts_gpu
from common import collator, engine_rows, trainer_rows
from tunesmith import Trainer
from tunesmith.speedups.model_graphs import ModelGraphs

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
WHOLE = {
    "unmodified",
    "adamw_torch",
    "lower half frozen",
    "accumulation 2",
    "fp32",
    "length grouping",
    "logging every step",
    "callback",
    "collator function",
    "two workers",
    "torch dataset",
    "shuffled dataset",
    "label smoothing",
    "layer-wise learning rates",
}
WHOLE |= {"evaluation every 50 steps"}
"""Scripts whose steps are captured as a whole."""


def run(
    name: str,
    base: Any,
    folder: Path,
    dropout: float = 0.0,
    resume: Any = None,
    multiple: int | None = None,
    **given: Any,
) -> Any:
    """Train a script on two layers of BERT with seeded weights and return the Trainer."""
    config = transformers.BertConfig(
        num_hidden_layers=2, num_labels=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    options = {"max_steps": 60, "logging_steps": 1, "per_device_train_batch_size": 16, **given}
    rows = trainer_rows(engine_rows("mrpc", "train", 960))
    trainer = scripts_gpu.make_trainer(name, base, folder, config, rows, collator(multiple), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", list(scripts_gpu.SCRIPTS))
def test_script_losses_match_transformers(name: str, tmp_path: Path) -> None:
    if name == "LoRA":
        pytest.importorskip("peft")
    kinds: tuple[Any, Any] = (Trainer, transformers.Trainer)
    if name == "length grouping":  # tunesmith sorts differently
        kinds = (Trainer, type("Plain", (Trainer,), {"use_speed_ups": False}))
    # Adafactor normalizes gradients that are only rounding errors, so both libraries pad to the same width.
    multiple = 16 if name == "adafactor" else None
    ours, theirs = (
        run(name, kind, tmp_path / kind.__name__ / kind.__module__, multiple=multiple, bf16=False) for kind in kinds
    )
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-2 if name == "fp16" else 1e-5)
    report = ours._describe_speedups()
    if name == "gradient checkpointing":
        assert "CUDA graph of the encoder is off because gradient checkpointing" in report
    else:
        assert ("Speedups: CUDA graph of the encoder." in report) == (name not in WHOLE), report


@pytest.mark.parametrize("name", ["compute_loss override", "R-Drop", "siamese"])
def test_script_with_dropout_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 23, "full_determinism": True, "dropout": 0.1}
    try:
        one = run(name, Trainer, tmp_path / "one", **options)
        again = run(name, Trainer, tmp_path / "again", resume=str(tmp_path / "one" / "checkpoint-23"), **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True))


FAMILIES = ["bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta-v2", "modernbert", "ernie"]


def make(kind: str, dropout: float = 0.0) -> Any:
    """Return a small classifier on the GPU and a batch for it."""
    torch.manual_seed(0)
    names = (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "embedding_dropout"),
        *("seq_classif_dropout", "classifier_dropout_prob"),
    )
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_labels": 2, **dict.fromkeys(names, dropout)}
    if kind == "modernbert":
        sizes |= {"mlp_dropout": dropout, "local_attention": 32}
    if kind == "deberta-v2":
        sizes |= {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 32,
        }
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForSequenceClassification.from_config(config).cuda().train()
    lengths = torch.tensor([41, 9, 30, 17], device="cuda")
    mask = (torch.arange(41, device="cuda") < lengths[:, None]).long()
    ids = torch.randint(1000, 2000, mask.shape, device="cuda")
    ids = torch.where(mask == 1, ids, config.pad_token_id or 0)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0, 1], device="cuda")}


def gradient(model: Any, batch: Any, *, bf16: bool) -> torch.Tensor:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        loss = model(**batch).loss
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", FAMILIES)
def test_captured_gradients_are_as_accurate_as_autocast(kind: str) -> None:
    model, batch = make(kind)
    exact, autocast = gradient(model, batch, bf16=False), gradient(model, batch, bf16=True)
    graphs = ModelGraphs(model, half=True)
    with graphs.active():
        found = gradient(model, batch, bf16=True)
    assert graphs.off is None
    assert float((found - exact).norm()) < 1.2 * float((autocast - exact).norm())
    graphs = ModelGraphs(model)
    with graphs.active():
        assert float((gradient(model, batch, bf16=False) - exact).norm() / exact.norm()) < 1e-4


def test_dropout_has_mean_of_plain_model() -> None:
    model, batch = make("bert", dropout=0.2)
    graphs = ModelGraphs(model)
    plain = torch.stack([model(**batch).loss.detach() for _ in range(400)]).double()
    with graphs.active():
        found = torch.stack([model(**batch).loss.detach() for _ in range(400)]).double()
    assert graphs.captures == 1
    assert len(found.unique()) > 390, "every replay draws different masks"
    error = float((plain.var() / 400 + found.var() / 400).sqrt())
    assert abs(float(plain.mean() - found.mean())) < 4 * error
    assert abs(float((plain.std() / found.std()).log())) < 0.25


def test_failed_capture_leaves_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("bert")
    expected = gradient(model, batch, bf16=False)
    kind = type(model.bert.encoder)
    own = kind.forward

    def reads(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        float(hidden_states.sum())
        return own(self, hidden_states, *args, **kwargs)

    graphs = ModelGraphs(model)
    reads.__module__ = kind.__module__
    monkeypatch.setattr(kind, "forward", reads)
    with graphs.active():
        found = gradient(model, batch, bf16=False)
    assert "reads values back from the GPU" in str(graphs.off)
    torch.testing.assert_close(found, expected)
    torch.nn.functional.dropout(torch.ones(4, device="cuda"))  # the random generator still works
