"""How the time of a captured step on a GPU is spent: ms a step, memory, and the kernels by their time.

    PYTHONPATH=src python bench/profile_gpu.py [--shapes bert-base ...] [--batch 8 ...] [--lines 20]

Shapes of bench/families_gpu.py, MRPC's token ids (scratch/tokens by bench/token_ids.py), bf16, dropout on, rows in random
order. Two passes over the windows of an epoch, at most `--windows` (the second has its graphs), one window again and again,
then five steps under torch's profiler. Where the second pass takes longer than the kernels are busy, the host is the limit.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from families_gpu import SHAPES, make_model
from token_files import engine_rows
from tunesmith.data.batches import Batches, Padding, Window
from tunesmith.labels import LabelMap
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.state import TrainState
from tunesmith.training.step import train_step


def make_state(shape: str, batch: int) -> tuple[TrainState, list[Window]]:
    """The engine as a run has it, and the windows of an epoch."""
    rows, runtime, labels = (
        engine_rows("mrpc", "train"),
        make_runtime(precision="bf16"),
        LabelMap.for_classes(["0", "1"]),
    )
    model = make_model(shape)
    chosen = apply_speedups(model, rows, Padding(), device=runtime.device, precision="bf16")
    print(", ".join(chosen.on))
    optimizer = make_optimizer(model, learning_rate=5e-5)
    state = TrainState(model, optimizer, TaskLoss(labels.task, 2), runtime, speedups=chosen, only_writer=True)
    batches = Batches(rows, chosen.train_collate, batch, seed=1, sampling="random", ahead=4, pinned=True)
    return state, list(batches.windows(0))[: len(rows) // batch]


def run(state: TrainState, windows: Iterable[Window]) -> float:
    """Milliseconds a step."""
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    for window in windows:
        train_step(state, window, learning_rate=5e-5, max_grad_norm=1.0, seed=1)
        count += 1
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


def show(shape: str, batch: int, most: int, lines: int) -> None:
    """Prints times, memory and a table of kernels."""
    state, windows = make_state(shape, batch)
    windows = windows[:most]
    torch.cuda.reset_peak_memory_stats()
    print(f"== {shape}, batch {batch}; first step, with what it compiles: {run(state, windows[:1]) / 1e3:.1f} s")
    for number in (1, 2):
        print(f"pass {number}: {run(state, windows):.2f} ms a step, {len(state.graphs or ())} graphs")
    print(
        f"one window: {run(state, windows[:1] * 100):.2f} ms, {windows[0].micro_batches[0].padded_tokens} tokens with filling"
    )
    print(f"held at most {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(state, windows[:1] * 5)
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    print(f"{sum(map(len, times.values())) / 5:.0f} kernels, busy {sum(map(sum, times.values())) / 5:.0f} us a step")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:lines]:
        print(f"{sum(each) / 5:9.1f} us {len(each) / 5:6.1f}x {name[:100]}", flush=True)


def main() -> None:
    """One block of lines for each shape and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["bert-base"])
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--windows", type=int, default=10**6)
    parser.add_argument("--lines", type=int, default=20)
    args = parser.parse_args()
    for shape in args.shapes:
        for batch in args.batch:
            show(shape, batch, args.windows, args.lines)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
