"""Measure how well the share of wrong training labels is estimated: planted errors, clean and noisy validation labels.

    python bench/label_noise.py --tasks cr trec sick_entailment mrpc --model ../shared/models/paraphrase-MiniLM-L3-v2
    python bench/label_noise.py --tasks subj news6 r8 --output docs/research/measurements/label_noise.json

The first tasks are development tasks, the others are held out.

Reads 1,500 training examples per task with a frozen encoder, replaces labels with wrong ones, and estimates the share as a
run does: from out-of-fold predictions of the linear probe and its predictions of validation examples. Takes minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from tunesmith.labels import Task
from tunesmith.metrics.calibration import LabelNoise, estimate_label_noise
from tunesmith.models.files import find_embedded
from tunesmith.pipeline.probe import fit_linear

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
RATES = (0.0, 0.1, 0.2, 0.4)
SEEDS = 3


def read_task(task: str, rows: int) -> tuple[list[tuple[str, ...]], Any]:
    """Return the texts and label ids of some training examples."""
    folder, _, kind = task.partition("_")
    file = SHARED / "data" / folder / (f"train_{kind}.tsv" if kind else "train.tsv")
    with file.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    columns = [name for name in found[0] if name not in ("idx", "id", "label")]
    found = [row for row in found if all(row[name].strip() for name in columns)]
    some = [found[i] for i in np.random.default_rng(0).permutation(len(found))[:rows]]
    names = sorted({row["label"] for row in some})
    return [tuple(row[name] for name in columns) for row in some], np.array([names.index(row["label"]) for row in some])


@torch.inference_mode()
def embed(folder: str, texts: list[tuple[str, ...]]) -> torch.Tensor:
    """Return the mean-pooled token vectors, as in the linear probe."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = np.argsort([sum(map(len, row)) for row in texts], kind="stable")
    found = torch.zeros(len(texts), model.config.hidden_size)
    for at in range(0, len(texts), 32):
        some = order[at : at + 32]
        sides = [[texts[i][side] for i in some] for side in range(len(texts[0]))]
        batch = tokenizer(*sides, padding=True, truncation=True, max_length=128, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        found[some] = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return found


def plant(labels: Any, classes: int, rate: float, draw: np.random.Generator) -> Any:
    """Return the labels with this share replaced by random wrong ones."""
    wrong = np.zeros(len(labels), bool)
    wrong[draw.permutation(len(labels))[: round(rate * len(labels))]] = True
    return np.where(wrong, (labels + draw.integers(1, classes, len(labels))) % classes, labels)


def estimate(features: torch.Tensor, labels: Any, rows: int, rate: float, seed: int) -> dict[str, LabelNoise | None]:
    """Return the estimates with clean and with equally noisy validation labels."""
    draw, classes = np.random.default_rng(seed), int(labels.max()) + 1
    order = draw.permutation(len(labels))
    held_out = min(500, max(100, rows // 3))
    train, validation = order[:-held_out][:rows], order[-held_out:]
    given = plant(labels[train], classes, rate, draw)
    task = Task.BINARY if classes == 2 else Task.MULTICLASS
    fit = fit_linear(features[train], torch.from_numpy(given), task, classes)
    known, scores = (fit.held_out.numpy(), given), fit.logits(features[validation].double()).numpy()
    clean = labels[validation]
    noisy = plant(clean, classes, rate, draw)
    kinds = (("clean", clean), ("noisy", noisy))
    return {kind: estimate_label_noise([known, (scores, gold)], classes) for kind, gold in kinds}


def main() -> None:
    """Print every estimate, then a summary by number of examples and kind of validation labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["subj", "news6", "r8"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[300, 1000])
    parser.add_argument("--model", help="folder of the encoder [the bundled all-MiniLM-L6-v2]")
    parser.add_argument("--output", type=Path, help="write all estimates to this JSON file")
    args = parser.parse_args()
    model = Path(args.model).name if args.model else "all-MiniLM-L6-v2"
    written: list[dict[str, Any]] = []
    found: dict[tuple[int, str], list[tuple[float, LabelNoise | None]]] = {}
    for task in args.tasks:
        texts, labels = read_task(task, max(args.sizes) + 500)
        features = embed(args.model or str(find_embedded()), texts)
        for size in args.sizes:
            for rate in RATES:
                for seed in range(SEEDS):
                    for kind, noise in estimate(features, labels, size, rate, seed).items():
                        shown = "no estimate" if noise is None else noise.text()
                        print(f"{task}, {size} examples, {rate:.0%} planted, {kind} validation: {shown}", flush=True)
                        found.setdefault((size, kind), []).append((rate, noise))
                        estimated = (
                            None if noise is None else {"share": noise.share, "low": noise.low, "high": noise.high}
                        )
                        run = {
                            "model": model,
                            "task": task,
                            "examples": size,
                            "planted": rate,
                            "seed": seed,
                            "validation": kind,
                        }
                        written.append({**run, "estimate": estimated})
    if args.output:
        args.output.write_text(json.dumps(written, indent=1) + "\n")
    print(
        "\n| Examples | Validation labels | Estimated | Within 5 points | In the interval | Correct labels called noisy |"
    )
    print("|---:|---|---:|---:|---:|---:|")
    for (size, kind), every in found.items():
        planted = [(rate, noise) for rate, noise in every if rate]
        precise = [(rate, noise) for rate, noise in planted if noise is not None and noise.is_precise]
        near = sum(abs(noise.share - rate) < 0.0501 for rate, noise in precise)
        inside = sum(noise.low <= rate <= noise.high for rate, noise in precise)
        clean = [noise for rate, noise in every if not rate]
        alarms = sum(noise is not None and noise.is_noisy for noise in clean)
        print(
            f"| {size:,} | {kind} | {len(precise)} of {len(planted)} | {near} of {len(precise)} | "
            f"{inside} of {len(precise)} | {alarms} of {len(clean)} |"
        )


if __name__ == "__main__":
    main()
