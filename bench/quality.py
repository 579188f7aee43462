"""Does the same recipe give the same quality? tunesmith and transformers.Trainer, several seeds, one table.

    .venv/bin/python bench/token_ids.py
    .venv/bin/python bench/quality.py --data mrpc --seeds 1 2 3 [--jobs 1]

The course recipe: batch 8, learning rate 5e-5, linear, 3 epochs, no warmup, fp32, the weights after the last step.
Both start from the same weights; each run is a process of its own, the engines take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from token_files import TOKENS, engine_rows, pad, trainer_rows

EVALUATE = {"mrpc": "validation", "trec": "test"}
LABELS = {"mrpc": 2, "trec": 6}
BF16 = bool(os.environ.get("QUALITY_BF16"))
"""Both engines in bf16; a GPU's own speed-ups are on by themselves."""


def train_ours(name: str, seed: int, epochs: float, rows: int | None, sampling: Any) -> Any:
    """Logits of the evaluation split by our engine."""
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.labels import LabelMap
    from tunesmith.models.load import load_model
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss, predict_rows
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
    from tunesmith.training.state import TrainState, seed_everything

    train, evaluation = engine_rows(name, "train", rows), engine_rows(name, EVALUATE[name])
    runtime = make_runtime(precision="bf16" if BF16 else "no")
    seed_everything(seed)
    labels = LabelMap.for_classes([str(i) for i in range(LABELS[name])])
    model = load_model(TOKENS / "minilm", labels).model.to(runtime.device)
    speedups = apply_speedups(model, train, Padding(), device=runtime.device, precision=runtime.precision)
    batches = Batches(train, speedups.train_collate, 8, seed=seed, sampling=sampling)
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=0, num_epochs=epochs)
    state = TrainState(
        model,
        make_optimizer(model, learning_rate=5e-5),
        TaskLoss(labels.task, len(labels)),
        runtime,
        speedups=speedups,
        only_writer=True,
    )
    every = 1 if runtime.device.type == "cpu" else 50
    plan = Plan(steps, ends, Schedule("linear", 5e-5, 0, steps), seed=seed, read_back_every=every)
    for _ in train_events(state, batches, plan):
        pass
    with speedups.whole():
        return predict_rows(model, evaluation, speedups.collate, runtime, max_rows=64).logits


def train_theirs(name: str, seed: int, epochs: float, rows: int | None, sampling: Any) -> Any:
    """Logits of the evaluation split by transformers.Trainer."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        str(TOKENS / "minilm"), num_labels=LABELS[name], dtype="float32"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            seed=seed,
            num_train_epochs=epochs,
            train_sampling_strategy=sampling,
            bf16=BF16,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        train = trainer_rows(engine_rows(name, "train", rows))
        trainer = Trainer(model, arguments, train_dataset=train, data_collator=pad)
        trainer.train()
        return trainer.predict(trainer_rows(engine_rows(name, EVALUATE[name]))).predictions


def one_run(args: argparse.Namespace) -> None:
    """Trains one engine with one seed and prints a JSON line."""
    import logging

    from sklearn.metrics import accuracy_score, f1_score

    logging.disable(logging.WARNING)
    started = time.perf_counter()
    train = train_ours if args.engine == "tunesmith" else train_theirs
    logits = train(args.data, args.seeds[0], args.epochs, args.rows, args.sampling)
    seconds = time.perf_counter() - started
    gold = engine_rows(args.data, EVALUATE[args.data]).labels
    guess = logits.argmax(-1)
    f1 = f1_score(gold, guess, average="binary" if args.data == "mrpc" else "macro")
    result = {"accuracy": accuracy_score(gold, guess), "f1": f1, "seconds": seconds}
    print(json.dumps({"engine": args.engine, "seed": args.seeds[0], **result}))


def main() -> None:
    """Runs every (seed, engine) in a process of its own and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="mrpc", choices=tuple(EVALUATE))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--rows", type=int, help="only the first rows of train")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (times are then not comparable)")
    parser.add_argument("--sampling", default="random", choices=("random", "group_by_length"))
    parser.add_argument("--engines", nargs="+", default=["tunesmith", "transformers"])
    parser.add_argument("--engine", choices=("tunesmith", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        one_run(args)
        return

    def start(job: tuple[int, str]) -> dict[str, Any]:
        seed, engine = job
        words = [sys.executable, __file__, "--data", args.data, "--seeds", str(seed), "--epochs", str(args.epochs)]
        words += ["--engine", engine, "--sampling", args.sampling, *(["--rows", str(args.rows)] if args.rows else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    jobs = [(seed, engine) for seed in args.seeds for engine in args.engines]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(start, jobs))
    print(
        f"{args.data} {EVALUATE[args.data]}, {args.epochs:g} epochs, order: {args.sampling}\n\n"
        "engine        seed  accuracy  f1      seconds"
    )
    for r in results:
        print(f"{r['engine']:<13} {r['seed']:<5} {r['accuracy']:.4f}    {r['f1']:.4f}  {r['seconds']:.0f}")
    for engine in args.engines:
        mine = [r for r in results if r["engine"] == engine]
        means = {k: statistics.mean(r[k] for r in mine) for k in ("accuracy", "f1")}
        print(f"{engine:<13} mean  {means['accuracy']:.4f}    {means['f1']:.4f}")


if __name__ == "__main__":
    main()
