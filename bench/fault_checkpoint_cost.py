"""What a checkpoint that survives anything costs over a plain write: BERT-base (110M parameters) with AdamW, 1.3 GB.

    python bench/fault_checkpoint_cost.py [--rounds 5] [--folder DIR]

plain: safetensors.save_file of weights and optimizer, nothing else. plain + fsync: the same, on disk when it returns.
tunesmith: fsync of every file, sha256, manifest, rename, fsync of the folder. tunesmith, the run waits: the copy in
memory that a run waits for before a thread writes it. Interleaved; medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tunesmith.runs.writing import fsync_path, hash_file
from tunesmith.training.checkpoint import Snapshot, contiguous

STEP_SECONDS = 0.1
"""A fast optimizer step of BERT-base (batch 32, one current GPU); on CPUs it is longer, and the share smaller."""
INTERVAL = 500
"""Steps between two checkpoints by default, at most."""


def make_tensors(parameters: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and AdamW moments of so many parameters, in layers of about 7 million."""
    layers = max(1, parameters // 7_000_000)
    size = parameters // layers
    weights = {f"layer.{i}.weight": torch.randn(size) for i in range(layers)}
    moments = {f"{key}:{name}": torch.randn(size) for key in ("exp_avg", "exp_avg_sq") for name in weights}
    return weights, moments


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=110_000_000)
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoint_cost"))
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    weights, moments = make_tensors(args.parameters)

    def plain(folder: Path) -> None:
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        save_file(moments, folder / "optimizer.safetensors")

    def plain_fsync(folder: Path) -> None:
        plain(folder)
        for file in folder.iterdir():
            fsync_path(file)

    whole = Snapshot({"model.safetensors": weights, "optimizer.safetensors": moments}, "{}", {"kind": "checkpoint"})
    buffers: dict[str, torch.Tensor] = {}

    def sealed(folder: Path) -> None:
        whole.write(folder, None)

    def copies(folder: Path) -> None:
        folder.mkdir()
        for name, tensors in whole.files.items():
            contiguous(tensors, buffers, name)

    ways: dict[str, Callable[[Path], None]] = {
        "plain": plain,
        "plain + fsync": plain_fsync,
        "tunesmith": sealed,
        "tunesmith, the run waits": copies,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    copies(args.folder / "state")  # the first copy of a run takes fresh memory (0.5 s instead of 0.1 s)
    shutil.rmtree(args.folder / "state")
    try:
        for number in range(args.rounds):
            for name, way in ways.items():
                os.sync()
                started = time.perf_counter()
                way(args.folder / "state")
                times[name].append(time.perf_counter() - started)
                if number == 0 and name == "tunesmith":
                    started = time.perf_counter()
                    hash_file(args.folder / "state" / "optimizer.safetensors")
                    print(f"sha256 alone: {880 / (time.perf_counter() - started):.0f} MB/s")
                shutil.rmtree(args.folder / "state")
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        against = ", ".join(
            f"{seconds / medians[o] - 1:+.0%} over {o}" for o in ("plain", "plain + fsync") if o != name
        )
        share = seconds / (INTERVAL * STEP_SECONDS)
        print(f"{name:<25} {seconds:6.2f} s  ({spread})  {share:.2%} of the run  {against}")
    print(f"share of the run: a save every {INTERVAL} steps of {STEP_SECONDS} s")


if __name__ == "__main__":
    main()
