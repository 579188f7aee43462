"""Captured steps and fused layers on a GPU: run by hand there, `python tests/gpu/check_graphs.py [--layers 4]`.

From scratch/tokens (bench/token_ids.py). BERT-base's width with random weights. Prints a line a check, ends with 1 if one failed:
float32 without dropout against the plain step (losses of 100 steps 1e-5, weights 1e-4); bf16 gradients no further from
float32 than autocast's; captured or not, run again, resumed in the middle: the same bits, dropout on; dropout's mean loss.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from token_files import engine_rows
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.token_rows import TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import LabelMap
from tunesmith.model.fused_ops import SideStream
from tunesmith.train.loop import train_events
from tunesmith.train.losses import TaskLoss
from tunesmith.train.optim import make_optimizer
from tunesmith.train.plan import Plan, epoch_ends_for
from tunesmith.train.runtime import make_runtime
from tunesmith.train.schedule import Schedule
from tunesmith.train.seed import seed_everything
from tunesmith.train.state import TrainState
from tunesmith.train.step import micro_step
from tunesmith.train.strategies import choose_strategies

OFF = dict.fromkeys(("pack_rows", "first_token_only", "restrict_vocabulary", "fused_layers", "cuda_graphs"), "off")
failures: list[str] = []


def check(name: str, found: float, limit: float) -> None:
    """One printed line; notes a failure."""
    good = found <= limit
    print(f"{'ok  ' if good else 'FAIL'} {name}: {found:.3g} (limit {limit:.3g})", flush=True)
    if not good:
        failures.append(name)


def make_state(
    rows: TokenRows,
    layers: int,
    precision: Any,
    dropout: float,
    accumulation: int = 1,
    weights: Any = None,
    **wishes: Any,
) -> tuple[TrainState, Batches, Any]:
    """A fresh engine; the same start for all."""
    from transformers import BertConfig, BertForSequenceClassification

    seed_everything(0)
    runtime = make_runtime(precision=precision)
    labels = LabelMap.for_classes(["0", "1"])
    config = BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    model = BertForSequenceClassification(config).to(runtime.device)
    chosen = choose_strategies(model, rows, Padding(), device=runtime.device, precision=precision, **wishes)
    batches = Batches(
        rows,
        chosen.train_collate,
        8,
        seed=1,
        accumulation=accumulation,
        sampling="group_by_length",
        ahead=2,
        pinned=True,
    )
    optimizer = make_optimizer(model, learning_rate=5e-5, weight_decay=0.01, layers=chosen.fused)
    objective = TaskLoss(labels.task, 2, weights)
    return TrainState(model, optimizer, objective, runtime, cut=chosen.cut, graphs=chosen.graphs), batches, chosen


def train(state: TrainState, batches: Batches, steps: int, total: int = 400) -> list[float]:
    """Losses of the next steps of a run of `total`."""
    _, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=total, num_epochs=1)
    plan = Plan(total, ends, Schedule("linear", 5e-5, 10, total), seed=3, read_back_every=16)
    losses: list[float] = []
    target = state.step + steps
    for event in train_events(state, batches, plan, wants_read_back=lambda step: step >= target):
        if isinstance(event, StepDone):
            losses.append(float("nan") if event.loss is None else event.loss)
        if state.step >= target and len(losses) >= steps:
            break
    return losses


def weights(state: TrainState, chosen: Any) -> dict[str, torch.Tensor]:
    """All weights with the whole table, on the CPU."""
    with chosen.whole():
        return {n: p.detach().cpu().clone() for n, p in state.model.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest over all weights."""
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def check_float32(rows: TokenRows, layers: int) -> None:
    """Everything on, float32 and no dropout, against the plain step."""
    for name, options in {
        "batch 8": {},
        "4 micro-batches, class weights": {"accumulation": 4, "weights": (0.7, 1.6)},
    }.items():
        plain = make_state(rows, layers, "no", 0.0, **options, **OFF)
        ours = make_state(rows, layers, "no", 0.0, **options)
        a, b = train(*plain[:2], 100), train(*ours[:2], 100)
        assert ours[0].graphs is not None
        print(f"     {name}: {len(ours[0].graphs)} graphs, loss {a[0]:.4f} to {a[-1]:.4f}")
        check(f"float32, {name}: graphs captured at all", float(len(ours[0].graphs) == 0 or ours[0].graphs.off), 0)
        check(f"float32, {name}: losses of 100 steps", float(np.abs(np.array(a) - np.array(b)).max()), 1e-5)
        check(f"float32, {name}: weights after 100 steps", difference(weights(*plain[::2]), weights(*ours[::2])), 1e-4)


def gradient(state: TrainState, batches: Batches) -> torch.Tensor:
    """All gradients of the first batch but the word embedding's, as one vector."""
    window = next(iter(batches.windows(0)))
    state.model.train()
    micro_step(state, state.runtime.move(window.micro_batches[0]), 1 / 8)
    found = [p.grad.flatten() for n, p in state.model.named_parameters() if p.grad is not None and "word" not in n]
    return torch.cat(found).double()


def check_bf16(rows: TokenRows, layers: int) -> None:
    """Gradients of one batch in bf16: fused against autocast, by their distance from float32."""
    exact = gradient(*make_state(rows, layers, "no", 0.0, **OFF)[:2])
    theirs = gradient(*make_state(rows, layers, "bf16", 0.0, **OFF)[:2])
    ours = gradient(*make_state(rows, layers, "bf16", 0.0)[:2])
    a, b = (float((g - exact).norm() / exact.norm()) for g in (theirs, ours))
    print(f"     relative distance from float32: autocast {a:.3g}, fused {b:.3g}")
    check("bf16 gradients, fused beside autocast", b / a, 1.1)


def check_bits(rows: TokenRows, layers: int) -> None:
    """Dropout on, bf16: captured, uncaptured, again, and from a checkpoint: the same bits."""
    from tempfile import TemporaryDirectory

    from tunesmith.train.checkpoint import Identity, load_checkpoint, save_checkpoint

    one = make_state(rows, layers, "bf16", 0.1)
    losses = train(*one[:2], 60)
    again = make_state(rows, layers, "bf16", 0.1)
    check("bits: run again", float(np.abs(np.array(losses) - np.array(train(*again[:2], 60))).max()), 0)
    eager = make_state(rows, layers, "bf16", 0.1)
    assert eager[0].graphs is not None
    eager[0].graphs.off = True
    check("bits: uncaptured", float(np.abs(np.array(losses) - np.array(train(*eager[:2], 60))).max()), 0)
    check("bits: uncaptured, weights", difference(weights(*one[::2]), weights(*eager[::2])), 0)
    most, SideStream.MOST_TOKENS = SideStream.MOST_TOKENS, 0
    single = make_state(rows, layers, "bf16", 0.1)
    check("bits: on one stream", float(np.abs(np.array(losses) - np.array(train(*single[:2], 60))).max()), 0)
    SideStream.MOST_TOKENS = most
    first = make_state(rows, layers, "bf16", 0.1)
    begun = train(*first[:2], 37)
    with TemporaryDirectory() as folder:
        identity = Identity("x", "d", {}, {}, {})
        save_checkpoint(Path(folder) / "checkpoint-00000037", first[0], identity)
        second = make_state(rows, layers, "bf16", 0.1)
        load_checkpoint(Path(folder) / "checkpoint-00000037", second[0])
        begun += train(*second[:2], 23)
    check("bits: resumed at 37", float(np.abs(np.array(losses) - np.array(begun)).max()), 0)
    check("bits: resumed, weights", difference(weights(*one[::2]), weights(*second[::2])), 0)


def check_give_up(rows: TokenRows) -> None:
    """A capture that breaks: training goes on uncaptured, with the same bits."""
    one = make_state(rows, 2, "bf16", 0.1)
    losses = train(*one[:2], 40)
    broken = make_state(rows, 2, "bf16", 0.1)
    inner, calls = broken[0].objective, []

    class Breaks:
        weight = staticmethod(inner.weight)

        def sum(self, model: Any, batch: Any) -> Any:
            found = inner.sum(model, batch)
            if torch.cuda.is_current_stream_capturing():
                calls.append(1)
                float(found[0].detach())  # reads from the device, which a capture forbids
            return found

    broken[0].objective = Breaks()
    again = train(*broken[:2], 40)
    assert broken[0].graphs is not None
    check("broken capture: was tried, then given up", float(len(calls) != 1 or not broken[0].graphs.off), 0)
    check("broken capture: the same bits", float(np.abs(np.array(losses) - np.array(again)).max()), 0)


def check_dropout(rows: TokenRows) -> None:
    """Mean loss and mean gradient over many draws, fused against plain, in standard errors."""
    sides = []
    for wishes in (OFF, {}):
        state, batches, _ = make_state(rows, 2, "bf16", 0.2, **wishes)
        batch = state.runtime.move(next(iter(batches.windows(0))).micro_batches[0])
        state.model.train()
        losses, grads = [], []
        for _ in range(400):
            state.optimizer.zero_grad(set_to_none=True)
            losses.append(micro_step(state, batch, 1 / 8).double())
            found = [p.grad.flatten() for n, p in state.model.named_parameters() if "layer.0" in n or "classifier" in n]
            grads.append(torch.cat(found)[::997].double())
        sides.append((torch.stack(losses), torch.stack(grads)))
    (a, g), (b, h) = sides
    error = float((a.var() / 400 + b.var() / 400).sqrt())
    check("dropout, mean loss in standard errors", abs(float(a.mean() - b.mean())) / error, 4)
    check("dropout, spread of the loss", abs(float((a.std() / b.std()).log())), 0.25)
    apart = (g.mean(0) - h.mean(0)) / (g.var(0) / 400 + h.var(0) / 400).sqrt()
    print(
        f"     {apart.numel()} gradients: spread of their distance in standard errors {float(apart.std()):.2f} (1 expected)"
    )
    check("dropout, mean gradients: spread in standard errors", abs(float(apart.std()) - 1), 0.15)
    check("dropout, spread of gradients", abs(float((g.var(0).mean() / h.var(0).mean()).log())), 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    rows = engine_rows("mrpc", "train")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {layers} layers")
    for one in (check_float32, check_bf16, check_bits):
        try:
            one(rows, layers)
        except Exception as error:
            print(f"FAIL {one.__name__}: {str(error)[:300]}")
            failures.append(one.__name__)
    check_dropout(rows)
    check_give_up(rows)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {', '.join(failures)}")
    print("all checks passed")


if __name__ == "__main__":
    main()
