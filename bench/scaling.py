"""Two ranks beside one on this machine: rows a second, and how the time of a step is spent.

    python bench/scaling.py                        # embedded model, sample data
    python bench/scaling.py --steps 40 --rows 16   # rows: of one optimizer step, over all ranks

Each setting is a launch of its own (torchrun for two ranks), all with the same rows in the same steps. "waiting" is how long a
rank waits until the slowest has finished its rows (mean over the ranks). "gradient exchange" is the time of the all-reduce
measured on its own, on tensors as large as the trained parameters; what DDP hides behind the backward pass does not show in the
step. "rest" is clipping, update and whatever the parts do not explain. Settings take turns for `--rounds` rounds, the median is
reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}


def measure(steps: int, rows_per_step: int) -> dict[str, Any]:
    """Times of one setting, seen from rank 0."""
    import csv

    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from tunesmith import (
        Batches,
        TaskLoss,
        TokenRows,
        TrainState,
        apply_speedups,
        find_embedded,
        make_optimizer,
        make_runtime,
        padding_of,
        predict_rows,
        sample_file,
        set_seed,
    )
    from tunesmith.labels import LabelMap, Task
    from tunesmith.models.load import load_model
    from tunesmith.training.step import train_step

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    set_seed(0)
    runtime = make_runtime(use_cpu=True)
    folder = find_embedded()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with open(sample_file("train"), encoding="utf-8") as file:
        table = list(csv.DictReader(file))[: max(rows_per_step * (steps + 3), 256)]
    encoded = tokenizer([r["sentence1"] for r in table], [r["sentence2"] for r in table], truncation=True)
    labels = [int(r["label"] == "equivalent") for r in table]
    data = TokenRows.from_lists(
        {"input_ids": encoded["input_ids"], "token_type_ids": encoded["token_type_ids"], "labels": labels}
    )
    model = load_model(folder, LabelMap(("not_equivalent", "equivalent"), Task.BINARY)).model
    speedups = apply_speedups(model, data, padding_of(tokenizer), device=runtime.device)
    state = TrainState(
        model, make_optimizer(model, learning_rate=5e-5), TaskLoss(Task.BINARY, 2), runtime, speedups=speedups
    )
    batches = Batches(
        data,
        speedups.train_collate,
        rows_per_step // runtime.world,
        seed=0,
        sampling="group_by_length",
        rank=runtime.rank,
        world=runtime.world,
    )
    windows = list(batches.windows(0))[: steps + 3]
    times: list[float] = []
    for window in windows:
        runtime.barrier()
        began = time.perf_counter()
        train_step(state, window, learning_rate=5e-5, max_grad_norm=1.0, seed=0)
        times.append(time.perf_counter() - began)
    compute, waiting = _alone(state, windows[3:], runtime)
    exchange = _exchange(state, runtime, torch)
    runtime.barrier()
    began = time.perf_counter()
    with speedups.whole():
        predict_rows(model, data.select(np.arange(256)), speedups.collate, runtime, max_rows=64)
    return {
        "step": statistics.median(times[3:]),
        "compute": compute,
        "waiting": waiting,
        "exchange": exchange,
        "evaluation": time.perf_counter() - began,
    }


def _alone(state: Any, windows: list[Any], runtime: Any) -> tuple[float, float]:
    """(forward and backward of a rank's micro-batches without any exchange, waiting for the slowest rank of a step).

    Both are means over the ranks and medians over the steps: together, the time of the slowest rank.
    """
    computing, waiting = [], []
    for window in windows:
        runtime.barrier()
        began = time.perf_counter()
        for batch in window.micro_batches:
            (state.objective.sum(state.model, batch)[0] / len(window.rows)).backward()
        all_ranks = runtime.gather_objects(time.perf_counter() - began)
        computing.append(statistics.mean(all_ranks))
        waiting.append(max(all_ranks) - computing[-1])
        state.optimizer.zero_grad(set_to_none=True)
    return statistics.median(computing), statistics.median(waiting)


def _exchange(state: Any, runtime: Any, torch: Any) -> float:
    """All-reduce of as many numbers as are trained, in DDP's 25 MB buckets."""
    if runtime.world == 1:
        return 0.0
    count = sum(p.numel() for g in state.optimizer.param_groups for p in g["params"])
    size = 25 * 2**20 // 4
    buckets = [torch.zeros(min(size, count - at)) for at in range(0, count, size)]
    times = []
    for _ in range(7):
        runtime.barrier()
        began = time.perf_counter()
        for bucket in buckets:
            torch.distributed.all_reduce(bucket)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def launch(ranks: int, threads: int, steps: int, rows: int, out: Path) -> dict[str, float]:
    """One setting in processes of its own."""
    here = [str(Path(__file__).resolve()), "--worker", str(out), "--steps", str(steps), "--rows", str(rows)]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, *start, *here], env=env, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path)
    args = parser.parse_args()
    if args.worker:
        found = measure(args.steps, args.rows)
        if int(os.environ.get("RANK", "0")) == 0:
            args.worker.write_text(json.dumps(found))
        return
    out = Path(f"/tmp/scaling-{os.getpid()}.json")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(args.rounds):
        for name, (ranks, threads) in SETTINGS.items():
            rounds[name].append(launch(ranks, threads, args.steps, args.rows, out))
    out.unlink()
    print(
        f"{args.rows} rows a step, {args.steps} steps, median of {args.rounds} rounds; load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| setting | rows/s | step ms | forward+backward ms | waiting ms | gradient exchange ms | rest ms "
        "| evaluation of 256 rows ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, results in rounds.items():
        mid = {key: statistics.median(r[key] for r in results) for key in results[0]}
        rest = max(mid["step"] - mid["compute"] - mid["waiting"] - mid["exchange"], 0.0)
        cells = [mid["step"], mid["compute"], mid["waiting"], mid["exchange"], rest, mid["evaluation"]]
        print(f"| {name} | {args.rows / mid['step']:.1f} | " + " | ".join(f"{1000 * c:.0f}" for c in cells) + " |")


if __name__ == "__main__":
    main()
