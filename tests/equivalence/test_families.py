"""Any AutoModelForSequenceClassification trains: nine architectures with tiny random weights, for a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.errors import ConfigError
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap
from tunesmith.models.load import load_model
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # with the usual 0.02, a model this narrow needs a hundred steps to exceed chance level
}
DISTIL: dict[str, Any] = {
    "vocab_size": 160,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 64,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "distilbert": {**DISTIL, "max_position_embeddings": 64, "pad_token_id": 0},
    "roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 2},
    "electra": {**SIZES, "embedding_size": 16},
    "albert": {**SIZES, "embedding_size": 16},
    "mpnet": {**SIZES, "pad_token_id": 1},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    "modernbert": {**SIZES, "local_attention": 16},
    "roformer": {**SIZES, "embedding_size": 32},
}
UNKNOWN = {"roformer"}
"""Architectures that compute padding: the reason is reported, and they train without speedups."""


def save_random(family: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed

    set_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def make_rows(family: str, count: int) -> TokenRows:
    data = token_lists(count)
    if family in ("distilbert", "mpnet", "modernbert"):
        del data["token_type_ids"]
    return TokenRows.from_lists(data)


# DeBERTa-v2 uses torch.jit.script on import, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_architecture_learns_a_repeated_batch(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    rows = make_rows(family, 16)
    labels = LabelMap.for_classes(("no", "yes"))
    loaded = load_model(tmp_path, labels)
    model = loaded.model
    for module in model.modules():  # with dropout, the loss might not fall
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    runtime = make_runtime(use_cpu=True)
    padding = Padding(FAMILIES[family]["pad_token_id"])
    speedups = apply_speedups(model, rows, padding, device=runtime.device)
    if family not in UNKNOWN:
        assert "packing" in speedups.on
    else:
        assert any(note.startswith("padding_free is off: ") for note in speedups.notes), "a fallback must be reported"
    batches = Batches(rows, speedups.train_collate, 16, seed=1)
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=12, num_epochs=1)
    state = TrainState(
        model,
        make_optimizer(model, learning_rate=3e-3),
        TaskLoss(labels.task, 2),
        runtime,
        speedups=speedups,
    )
    plan = Plan(steps, ends, Schedule("linear", 3e-3, 2, steps), seed=1)
    losses = [e.loss for e in train_events(state, batches, plan) if isinstance(e, StepDone)]
    assert None not in losses
    assert len(losses) == 12
    assert (losses[-1] or 9) < 0.9 * (losses[0] or 0), losses
    speedups.close()
    plain = predict_rows(model, rows, padding, runtime, max_rows=16)
    assert plain.logits.shape == (16, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("family", sorted(UNKNOWN))
def test_unsupported_strategy_raises_if_requested(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    model = load_model(tmp_path, LabelMap.for_classes(("no", "yes"))).model
    with pytest.raises(ConfigError, match="--padding_free on is not possible"):
        apply_speedups(model, None, Padding(), device=torch.device("cpu"), pack_rows="on")
