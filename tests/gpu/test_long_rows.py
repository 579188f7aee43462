"""Texts longer than one block of torch's attention kernels are trained bit-identically, repeated and uncaptured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gpu_engine import OFF

from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import Task
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule
from tunesmith.training.state import TrainState, seed_everything

STEPS = 24


@pytest.fixture(scope="module")
def long_rows() -> TokenRows:
    """Return examples with 260 to 420 tokens."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(200, 30000, int(n)) for n in draw.integers(260, 420, 96)]
    return TokenRows.from_lists({"input_ids": ids, "labels": [int(x) for x in draw.integers(0, 2, 96)]})


def train(
    rows: TokenRows, kind: str, precision: Any, *, uncaptured: bool = False, dropout: float = 0.1, **wishes: Any
) -> Any:
    """Train two layers of base width for a few steps; return losses, weights and speedups."""
    seed_everything(0)
    runtime = make_runtime(precision=precision)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "mlp_dropout")
    given = {
        "num_labels": 2,
        "num_hidden_layers": 2,
        "vocab_size": 30522,
        "pad_token_id": 0,
        **dict.fromkeys(names, dropout),
    }
    config = transformers.AutoConfig.for_model(kind, **given)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(runtime.device)
    chosen = apply_speedups(model, rows, Padding(), device=runtime.device, precision=precision, **wishes)
    batches = Batches(rows, chosen.train_collate, 8, seed=1, sampling="random", ahead=2, pinned=True)
    optimizer = make_optimizer(model, learning_rate=5e-5)
    objective = TaskLoss(Task.BINARY, 2)
    state = TrainState(model, optimizer, objective, runtime, speedups=chosen)
    if chosen.graphs is not None:
        chosen.graphs.off = uncaptured
    plan = Plan(STEPS, (12, 24), Schedule("constant", 5e-5, 0, STEPS), seed=3, read_back_every=8)
    losses = [event.loss for event in train_events(state, batches, plan) if isinstance(event, StepDone)]
    with chosen.whole():
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, weights, chosen.on


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_long_rows_are_bit_identical_repeated_and_uncaptured(long_rows: TokenRows, kind: str, precision: Any) -> None:
    one = train(long_rows, kind, precision)
    assert "CUDA graphs" in one[2]
    for options in ({}, {"uncaptured": True}):
        losses, weights, _ = train(long_rows, kind, precision, **options)
        assert losses == one[0], options
        assert torch.equal(weights, one[1]), options
    assert not torch.are_deterministic_algorithms_enabled()


def test_losses_of_long_rows_equal_the_plain_step(long_rows: TokenRows) -> None:
    """Compare packed steps with CUDA graphs with plain steps in float32 without dropout."""
    ours = train(long_rows, "bert", "no", dropout=0.0)
    plain = train(long_rows, "bert", "no", dropout=0.0, **OFF)
    assert max(abs(a - b) for a, b in zip(ours[0], plain[0], strict=True)) < 1e-5
    assert float((ours[1] - plain[1]).abs().max()) < 1e-4
