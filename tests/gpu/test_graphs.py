"""CUDA graphs and fused layers match the plain step in float32, are as accurate as autocast in bf16, and are reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine import OFF, apart, difference, gradient, gradients_of_first, make_state, train, weights

from tunesmith.training.checkpoint import Identity, capture, load_checkpoint, save_checkpoint
from tunesmith.training.step import micro_step

LAYERS = 4


@pytest.mark.parametrize(
    "options", [{}, {"accumulation": 4, "weights": (0.7, 1.6)}], ids=["batch 8", "4 micro-batches, class weights"]
)
def test_captured_float32_steps_match_plain_steps(rows: Any, options: dict[str, Any]) -> None:
    plain, wide = (make_state(rows, LAYERS, "no", 0.0, multiple=m, **options, **OFF) for m in (None, 32))
    ours = make_state(rows, LAYERS, "no", 0.0, **options)
    expected, padded, found = (train(*made[:2], 100) for made in (plain, wide, ours))
    assert ours[0].graphs is not None
    assert len(ours[0].graphs) > 0, "nothing was captured"
    assert not ours[0].graphs.off
    # More padding changes only rounding, which training amplifies. Packing changes it about three times as much.
    assert apart(expected, found) < max(1e-5, 6 * apart(expected, padded))
    rounding = difference(weights(*plain[::2]), weights(*wide[::2]))
    assert difference(weights(*plain[::2]), weights(*ours[::2])) < max(1e-4, 6 * rounding)


@pytest.mark.parametrize("batch", [8, 64], ids=["attention tile by tile", "attention row by row"])
def test_bf16_gradients_are_as_accurate_as_autocast(rows: Any, batch: int) -> None:
    exact = gradient(*make_state(rows, LAYERS, "no", 0.0, batch=batch, **OFF)[:2])
    theirs = gradient(*make_state(rows, LAYERS, "bf16", 0.0, batch=batch, **OFF)[:2])
    ours = gradient(*make_state(rows, LAYERS, "bf16", 0.0, batch=batch)[:2])
    autocast, fused = (float((g - exact).norm() / exact.norm()) for g in (theirs, ours))
    assert fused < 1.1 * autocast


@pytest.mark.parametrize("batch", [8, 64])
def test_bf16_embedding_gradients_are_as_accurate_as_autocast(rows: Any, batch: int) -> None:
    exact = gradients_of_first(*make_state(rows, LAYERS, "no", 0.0, batch=batch, **OFF)[:2])
    theirs = gradients_of_first(*make_state(rows, LAYERS, "bf16", 0.0, batch=batch, **OFF)[:2])
    ours = gradients_of_first(*make_state(rows, LAYERS, "bf16", 0.0, batch=batch)[:2])
    block = [name for name in exact if ".embeddings." in name]
    assert len(block) == 5
    far = {n: [float((side[n] - exact[n]).norm()) for side in (theirs, ours)] for n in block}
    autocast, fused = (sum(errors[i] ** 2 for errors in far.values()) ** 0.5 for i in (0, 1))
    assert fused < 1.1 * autocast
    assert all(errors[1] < 1.3 * errors[0] for errors in far.values()), far


@pytest.fixture(scope="module")
def unbroken(rows: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of 60 steps with CUDA graphs in bf16 with dropout, and the final weights."""
    state = make_state(rows, LAYERS, "bf16", 0.1)
    return train(*state[:2], 60), weights(*state[::2])


@pytest.mark.parametrize("how", ["again", "uncaptured"])
def test_graph_steps_are_bit_identical_and_match_uncaptured(rows: Any, unbroken: Any, how: str) -> None:
    state = make_state(rows, LAYERS, "bf16", 0.1)
    assert state[0].graphs is not None
    state[0].graphs.off = how == "uncaptured"
    assert train(*state[:2], 60) == unbroken[0]
    assert difference(weights(*state[::2]), unbroken[1]) == 0


def test_resumed_run_is_bit_identical(rows: Any, unbroken: Any, tmp_path: Path) -> None:
    first, second = (make_state(rows, LAYERS, "bf16", 0.1) for _ in range(2))
    losses = train(*first[:2], 37)
    save_checkpoint(tmp_path / "checkpoint-00000037", first[0], Identity("x", "d", {}, {}, {}))
    load_checkpoint(tmp_path / "checkpoint-00000037", second[0])
    assert losses + train(*second[:2], 23) == unbroken[0]
    assert difference(weights(*second[::2]), unbroken[1]) == 0


def test_buffered_snapshot_is_unchanged_while_steps_continue(rows: Any) -> None:
    state, batches, _ = make_state(rows, 2, "bf16", 0.1)
    train(state, batches, 20)
    identity = Identity("x", "d", {}, {}, {})
    waited, kept = capture(state, identity), capture(state, identity, {})
    assert waited is not None
    assert kept is not None
    train(state, batches, 20)
    for file, tensors in waited.files.items():
        assert all(torch.equal(tensor, kept.files[file][name]) for name, tensor in tensors.items()), file


def test_failed_capture_continues_with_bit_identical_losses(rows: Any) -> None:
    expected = train(*make_state(rows, 2, "bf16", 0.1)[:2], 40)
    state, batches, _ = make_state(rows, 2, "bf16", 0.1)
    inner, calls = state.objective, []

    class Breaks:
        weight = staticmethod(inner.weight)

        def sum(self, model: Any, batch: Any) -> Any:
            found = inner.sum(model, batch)
            if torch.cuda.is_current_stream_capturing():
                calls.append(1)
                float(found[0].detach())  # reads from the device, which a capture forbids
            return found

    state.objective = Breaks()
    assert train(state, batches, 40) == expected
    assert state.graphs is not None
    assert state.graphs.off
    assert calls == [1]


def test_dropout_has_mean_and_spread_of_plain_step(rows: Any) -> None:
    draws, sides = 400, []
    for wishes in (OFF, {}):
        state, batches, _ = make_state(rows, 2, "bf16", 0.2, **wishes)
        batch = state.runtime.move(next(iter(batches.windows(0))).micro_batches[0])
        state.model.train()
        losses, grads = [], []
        for _ in range(draws):
            state.optimizer.zero_grad(set_to_none=True)
            losses.append(micro_step(state, batch, 1 / 8).double())
            found = [p.grad.flatten() for n, p in state.model.named_parameters() if "layer.0" in n or "classifier" in n]
            grads.append(torch.cat(found)[::997].double())
        sides.append((torch.stack(losses), torch.stack(grads)))
    (a, g), (b, h) = sides
    error = float((a.var() / draws + b.var() / draws).sqrt())
    assert abs(float(a.mean() - b.mean())) < 4 * error
    assert abs(float((a.std() / b.std()).log())) < 0.25
    errors = (g.mean(0) - h.mean(0)) / (g.var(0) / draws + h.var(0) / draws).sqrt()
    assert abs(float(errors.std()) - 1) < 0.15, "the mean gradients differ by more than their standard errors"
    assert abs(float((g.var(0).mean() / h.var(0).mean()).log())) < 0.1
