"""Memory that runs out inside the update: nothing is updated twice, and nothing half-updated is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import adam

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ResourceError
from tunesmith.labels import Task
from tunesmith.training.checkpoint import Identity, load_checkpoint, save_checkpoint
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.state import TrainState
from tunesmith.training.step import train_step

WHO = Identity("run", "data", {}, {}, {})


def make_state(fused: bool, dropout: float = 0.1) -> TrainState:
    model = tiny_bert(dropout=dropout)
    optimizer = make_optimizer(
        model, learning_rate=1e-2, weight_decay=0.1, optim="adamw_torch_fused" if fused else "adamw_torch"
    )
    assert len(optimizer.param_groups) == 2
    return TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True))


def train(state: TrainState, steps: int, first: int = 0) -> None:
    batches = Batches(TokenRows.from_lists(token_lists(40)), Padding(), 8, seed=3)
    for window in list(batches.windows(0))[first:steps]:
        train_step(state, window, learning_rate=1e-2, max_grad_norm=1.0, seed=0)


def fail_at(monkeypatch: pytest.MonkeyPatch, home: Any, name: str, call: int) -> None:
    """Memory runs out in the `call`-th call of a function, once."""
    real, calls = getattr(home, name), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("no memory, as the test asked")
        return real(*args, **kwargs)

    monkeypatch.setattr(home, name, run)


@pytest.mark.parametrize("fused", [True, False])
def test_out_of_memory_between_two_groups_stops_the_run_and_nothing_half_updated_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: bool
) -> None:
    whole, state = make_state(fused), make_state(fused)
    train(whole, 4)
    train(state, 2)
    save_checkpoint(tmp_path / "checkpoint-2", state, WHO)
    fail_at(monkeypatch, adam, "adam", 2)
    with pytest.raises(ResourceError, match=r"update of step 3.*last checkpoint"):
        train(state, 4, first=2)
    assert state.rows_limit is None, "smaller micro-batches do not help"
    assert {int(s["step"]) for s in state.optimizer.state.values()} == {2, 3}, "no group was updated twice"
    with pytest.raises(ResourceError, match="not saved"):
        save_checkpoint(tmp_path / "checkpoint-3", state, WHO)
    assert not (tmp_path / "checkpoint-3").exists()
    with pytest.raises(ResourceError, match="last checkpoint"):
        train(state, 4, first=2)
    load_checkpoint(tmp_path / "checkpoint-2", state)
    train(state, 4, first=2)
    expected = whole.model.state_dict()
    assert all(torch.equal(expected[n], t) for n, t in state.model.state_dict().items())


@pytest.mark.parametrize("fused", [True, False])
def test_out_of_memory_while_the_moments_are_made_changes_nothing_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    plain, state = make_state(fused, dropout=0.0), make_state(fused, dropout=0.0)
    train(plain, 1)
    fail_at(monkeypatch, torch, "zeros_like", 30)
    train(state, 1)
    assert state.rows_limit == 4, "it was met, and repeated with smaller micro-batches"
    assert {int(s["step"]) for s in state.optimizer.state.values()} == {1}
    for name, parameter in plain.model.named_parameters():
        expected = plain.optimizer.state[parameter]["exp_avg"]
        got = state.optimizer.state[state.model.get_parameter(name)]["exp_avg"]
        assert torch.allclose(expected, got, rtol=1e-3, atol=1e-7), name
