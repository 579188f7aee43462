"""What attention in one order costs on a GPU where rows are long: captured steps as torch runs its kernels, and in one order.

    PYTHONPATH=src python bench/long_rows_gpu.py [--models bert ernie] [--precision bf16] [--rows 260 420] [--batch 8]

Base-sized models with random weights, random token ids, dropout on. One window again and again: the median of five turns of
12 steps, with the fastest and the slowest. `our kernels` is the attention of fast/attention_kernels.py at any length
(decisions/0126).
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import transformers

from tunesmith.data.batches import Batches, Padding, Window
from tunesmith.data.tokens import TokenRows
from tunesmith.labels import Task
from tunesmith.speedups import attention, fused_attention, in_step, steady_attention
from tunesmith.speedups.strategies import choose_strategies
from tunesmith.training.evaluate import TaskLoss
from tunesmith.training.optim import make_optimizer
from tunesmith.training.runtime import make_runtime
from tunesmith.training.state import TrainState, seed_everything
from tunesmith.training.step import train_step

WAYS = ("as torch runs it", "in one order", "our kernels")
OWN = in_step.steady_attention, steady_attention.order_gradient


def make_rows(shortest: int, longest: int) -> TokenRows:
    """320 rows of random ids."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(200, 30000, int(n)) for n in draw.integers(shortest, longest, 320)]
    return TokenRows.from_lists({"input_ids": ids, "labels": [int(x) for x in draw.integers(0, 2, 320)]})


def prepare(kind: str, precision: Any, rows: TokenRows, batch: int) -> tuple[TrainState, Window]:
    """The engine as a run has it, and its first window."""
    seed_everything(0)
    runtime = make_runtime(precision=precision)
    config = transformers.AutoConfig.for_model(kind, num_labels=2, vocab_size=30522, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(runtime.device)
    chosen = choose_strategies(model, rows, Padding(), device=runtime.device, precision=precision)
    batches = Batches(rows, chosen.train_collate, batch, seed=1, sampling="random", pinned=True)
    captured = chosen.graphs is not None
    optimizer = make_optimizer(model, learning_rate=5e-5, layers=chosen.fused, only_writer=True, captured=captured)
    objective = TaskLoss(Task.BINARY, 2)
    state = TrainState(model, optimizer, objective, runtime, cut=chosen.cut, graphs=chosen.graphs, strategies=chosen)
    return state, next(iter(batches.windows(0)))


def set_way(way: str) -> None:
    """Which kernels run; the last one raises the limit of ours."""
    in_step.steady_attention = OWN[0] if way != WAYS[0] else lambda device: nullcontext()
    attention.order_gradient = OWN[1] if way != WAYS[0] else lambda out: out
    fused_attention.LONGEST_FUSED = fused_attention.LONGEST_OF_FEW = 512 if way == WAYS[2] else 256


def measure(state: TrainState, window: Window) -> list[float]:
    """Milliseconds a step, of five turns."""
    times = []
    for turn in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(12):
            train_step(state, window, learning_rate=5e-5, max_grad_norm=1.0, seed=1)
        torch.cuda.synchronize()
        if turn:  # the first one captures
            times.append((time.perf_counter() - began) / 12 * 1e3)
    return sorted(times)


def main() -> None:
    """One line for each model and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert", "ernie"])
    parser.add_argument("--precision", choices=["bf16", "no"], default="bf16")
    parser.add_argument("--rows", type=int, nargs=2, default=[260, 420], metavar="TOKENS")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    rows = make_rows(*args.rows)
    for kind in args.models:
        for way in WAYS:
            set_way(way)
            state, window = prepare(kind, args.precision, rows, args.batch)
            times, tokens = measure(state, window), window.micro_batches[0].padded_tokens
            between = f"{times[0]:.2f} to {times[-1]:.2f}"
            print(f"{kind:<10} {way:<18} {statistics.median(times):7.2f} ms ({between}), {tokens} tokens", flush=True)
            del state, window
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
