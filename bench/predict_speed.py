"""Compare `Predictor` with transformers' Trainer.predict and pipeline: same model and examples, turns in one process.

    .venv/bin/python bench/common.py                                           # once: token ids, words, tokenizer
    .venv/bin/python bench/predict_speed.py --rows 2000 --peer_rows 500        # a short run
    .venv/bin/python bench/predict_speed.py --rows 100000 --peer_rows 4000 --output docs/research/measurements/predict_cpu.json
    PYTHONPATH=src python bench/predict_speed.py --device cuda --precision bf16 --shape bert-base --rows 100000
    PYTHONPATH=src python bench/predict_speed.py --device cuda --precision bf16 --shape bert-base --rows 0 --mrpc_times 30 \
        --peer_rows 800 --batch 64 --pipeline_batch 64

There are two workloads: MRPC's test split (1,725 pairs, repeated `--mrpc_times`), and `--rows` examples with a long tail of
lengths (bench/common.py). `Predictor` runs once from token ids, like the Trainer, and once from text, like the pipeline. Peers
process all examples, or the first `--peer_rows` of each workload if all would take hours; the order is random, so rates are
comparable. The Trainer gets no labels, so it computes no loss. A ratio above 1 is slower than tunesmith with the same input.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from common import TOKENS, engine_rows, long_tail_lengths, make_rows, pad, read_texts, trainer_rows, write_record
from tunesmith.data.batches import TokenRows

Outputs = npt.NDArray[Any]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@dataclass(frozen=True)
class Work:
    """The same examples as token ids and as text."""

    name: str
    rows: TokenRows
    texts: list[str]
    pairs: list[str] | None

    def first(self, count: int) -> Work:
        """Return the first examples."""
        if count >= len(self.rows):
            return self
        pairs = None if self.pairs is None else self.pairs[:count]
        return Work(self.name, self.rows.select(np.arange(count)), self.texts[:count], pairs)

    def repeated(self, times: int) -> Work:
        """Return the examples repeated this many times."""
        pairs = None if self.pairs is None else self.pairs * times
        rows = self.rows.select(np.tile(np.arange(len(self.rows)), times))
        return Work(f"{self.name}, {times} times", rows, self.texts * times, pairs)


@dataclass
class Contestant:
    """One way to predict: `predict` returns logits (kind "ids") or probabilities (kind "text")."""

    name: str
    kind: str
    work: Work
    predict: Callable[[], Outputs]
    seconds: list[float]
    outputs: Outputs | None = None


def make_folder(shape: str, folder: Path) -> Path:
    """Save a classifier with a random head, in the format of a trained one."""
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    if shape == "minilm":
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            str(TOKENS / "minilm"), num_labels=2, dtype="float32"
        )
    else:
        model = BertForSequenceClassification(BertConfig(num_labels=2))
    with torch.no_grad():
        model.classifier.weight.mul_(
            20
        )  # logits as large as those of a trained head, so that differences are meaningful
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENS / "minilm" / name, folder)
    return folder


def make_ours(folder: Path, device: str, precision: str) -> Any:
    """Return a Predictor."""
    from tunesmith.inference.predictor import Predictor

    return Predictor.load(folder, use_cpu=device == "cpu", precision="bf16" if precision == "bf16" else "no")


def make_trainer(folder: Path, device: str, precision: str, batch: int, scratch: str) -> Callable[[Any], Outputs]:
    """Return a function that runs `Trainer.predict` on examples as dicts."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    model = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype="float32")
    arguments = TrainingArguments(
        scratch,
        per_device_eval_batch_size=batch,
        bf16_full_eval=precision == "bf16",
        use_cpu=device == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, data_collator=pad)

    def predict(rows: Any) -> Outputs:
        return np.asarray(trainer.predict(rows).predictions, dtype=np.float32)

    return predict


def make_pipeline(folder: Path, device: str, precision: str, batch: int) -> Callable[[Work], Outputs]:
    """Return a function that runs `pipeline("text-classification")` and returns the probabilities of all labels."""
    from transformers import pipeline

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pipe: Any = pipeline("text-classification", model=str(folder), device=device, dtype=dtype, batch_size=batch)

    def predict(work: Work) -> Outputs:
        if work.pairs is None:
            given: Sequence[Any] = work.texts
        else:
            given = [{"text": a, "text_pair": b} for a, b in zip(work.texts, work.pairs, strict=True)]
        answers = pipe(given, top_k=None, truncation=True, max_length=512)
        return np.array([[one["score"] for one in sorted(row, key=lambda one: one["label"])] for row in answers])

    return predict


def make_contestants(work: Work, folder: Path, args: argparse.Namespace, scratch: str) -> list[Contestant]:
    """Return all contestants, each with its own model, warmed up on a few examples."""
    few, some = work.first(64), work.first(args.peer_rows)
    found: list[Contestant] = []

    def add(name: str, kind: str, given: Work, predict: Callable[[Work], Outputs]) -> None:
        predict(few)
        found.append(Contestant(name, kind, given, lambda: predict(given), []))

    ours = make_ours(folder, args.device, args.precision)
    add("tunesmith", "ids", work, lambda w: ours.network.answer(w.rows))
    for batch in args.batch:
        trainer = make_trainer(folder, args.device, args.precision, batch, scratch)
        lists = {
            id(w): [{k: v for k, v in row.items() if k != "labels"} for row in trainer_rows(w.rows)]
            for w in (few, some)
        }
        add(f"Trainer.predict, batch {batch}", "ids", some, lambda w, t=trainer, rows=lists: t(rows[id(w)]))
    add("tunesmith, from text", "text", work, lambda w: ours.probabilities(w.texts, w.pairs))
    for batch in args.pipeline_batch:
        add(f"pipeline, batch {batch}", "text", some, make_pipeline(folder, args.device, args.precision, batch))
    return found


def take_turns(contestants: list[Contestant], rounds: int, device: str) -> None:
    """Time all turns; each round starts with a different contestant."""
    for number in range(rounds):
        at = number % len(contestants)
        for one in contestants[at:] + contestants[:at]:
            wait(device)
            began = time.perf_counter()
            one.outputs = one.predict()
            wait(device)
            one.seconds.append(time.perf_counter() - began)
            print(f"  {one.work.name}, round {number + 1}: {one.name} {one.seconds[-1]:.2f} s", flush=True)


def wait(device: str) -> None:
    """Wait until the GPU is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def summarize(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Return a line per contestant; ratio and difference are relative to tunesmith's line of the same kind."""
    found = []
    for one in contestants:
        ours = next(c for c in contestants if c.kind == one.kind)
        seconds = statistics.median(one.seconds)
        per_row, ours_per_row = (statistics.median(c.seconds) / len(c.work.rows) for c in (one, ours))
        assert one.outputs is not None
        assert ours.outputs is not None
        apart = np.abs(one.outputs - ours.outputs[: len(one.outputs)]).max()
        found.append(
            {
                "work": one.work.name,
                "name": one.name,
                "rows": len(one.work.rows),
                "seconds": round(seconds, 3),
                "rows_per_second": round(1 / per_row, 1),
                "ratio": round(per_row / ours_per_row, 2),
                "difference": float(f"{apart:.1e}"),
            }
        )
    return found


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the results in aligned columns."""
    print(f"\n{results[0]['work']:<28} {'rows':>8} {'seconds':>9} {'rows/s':>10} {'x tunesmith':>11} {'diff':>8}")
    for one in results:
        print(
            f"{one['name']:<28} {one['rows']:>8,} {one['seconds']:>9.2f} {one['rows_per_second']:>10,.1f} "
            f"{one['ratio']:>11.2f} {one['difference']:>8.0e}"
        )


def main() -> None:
    """Print one table per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--shape", choices=("minilm", "bert-base"), default="minilm")
    parser.add_argument("--rows", type=int, default=100_000, help="examples of the long-tail workload; 0: skip it")
    parser.add_argument("--mrpc_rows", type=int, default=10**9, help="examples of MRPC; 0: skip it")
    parser.add_argument("--mrpc_times", type=int, default=1, help="how often to repeat MRPC")
    parser.add_argument("--peer_rows", type=int, default=10**9, help="examples of each workload for the peers")
    parser.add_argument("--batch", type=int, nargs="*", default=[8, 64], help="batch sizes of Trainer.predict")
    parser.add_argument("--pipeline_batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    works = []
    if args.mrpc_rows:
        works.append(Work("MRPC test", engine_rows("mrpc", "test"), *read_texts()).first(args.mrpc_rows))
        if args.mrpc_times > 1:
            works = [works[0].repeated(args.mrpc_times)]
    if args.rows:
        rows, texts = make_rows(long_tail_lengths(args.rows))
        works.append(Work("long tail", rows, texts, None))
    results: list[dict[str, Any]] = []
    for work in works:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_folder(args.shape, Path(scratch) / "model")
            contestants = make_contestants(work, folder, args, scratch)
            take_turns(contestants, args.rounds, args.device)
        found = summarize(contestants)
        print_table(found)
        results += found
        del contestants
    facts = {"device": args.device, "precision": args.precision, "shape": args.shape}
    write_record(args.output, device=args.device, results=[{**one, **facts} for one in results], note=args.note)


if __name__ == "__main__":
    main()
