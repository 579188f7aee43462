"""How often does `tunesmith compare` see a difference between two runs of one config that differ in their seed alone?

    python bench/compare_false_positives.py [--seeds 12] [--rows 800] [--held_out 200 400] [--resamples 40] [--folder DIR]

Trains real models with one config and many seeds (a tiny random BERT by default; `--model`, `--train_file`, `--test_file` for
others), predicts a pool of held-out rows once, then draws many held-out sets from the pool and tests every pair of runs on
each with the same code as the command. Counted is the share of pairs called different: as two models (they are, a little),
and as two settings (they are not: at most 5% may be). With `--folder` the runs stay, and a
second call trains only the seeds that are missing: it can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
from tiny_training import make_hard_table, make_model, train_command

from tunesmith.data.row_cache import read_prediction_columns
from tunesmith.files import read_json
from tunesmith.metrics.paired import LEVEL, compare_predictions
from tunesmith.report.compare import Pair, pair_sides, read_side, with_seeds
from tunesmith.runs.layout import RunDir


def train_seeds(args: argparse.Namespace, folder: Path) -> list[Path]:
    """One finished run a seed."""
    model, train, test = args.model, args.train_file, args.test_file
    if train is None:
        model = model or make_model(folder / "model")
        train = make_hard_table(folder / "train.csv", rows=args.rows, seed=1)
        test = make_hard_table(folder / "test.csv", rows=args.pool, seed=2)
    found = []
    for seed in range(args.seeds):
        run = folder / f"seed-{seed}"
        found.append(run)
        if (run / "predictions.parquet").exists():
            continue
        more = [
            "--test_file",
            str(test),
            "--seed",
            str(seed),
            "--data_seed",
            "1",
            "--num_train_epochs",
            str(args.epochs),
        ]
        command = train_command(Path(model), Path(train), run, *more)
        command += shlex.split(args.flags)
        if args.learning_rate:
            command[command.index("--learning_rate") + 1] = args.learning_rate
        began = time.monotonic()
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        print(f"  seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def load_sides(runs: list[Path], split: str) -> list[Any]:
    """The labelled rows of each run's held-out pool."""
    sides = []
    for run in runs:
        folder = RunDir(run)
        side = read_side(read_prediction_columns(folder.predictions_file), read_json(folder.data_summary_file), split)
        if side is None:
            raise SystemExit(f"{run} has no labelled {split} rows")
        sides.append(side)
    return sides


def count_alarms(pair: Pair, metric: str, sets: list[Any]) -> list[tuple[bool, bool]]:
    """Whether each held-out set calls the two models different, and whether it calls their settings different."""
    scale: Any = "probabilities" if pair.given_a.ndim == 2 else "logits"
    found = []
    for rows in sets:
        decided = pair.decided[0][rows], pair.decided[1][rows]
        part = Pair(pair.task, pair.given_a[rows], pair.given_b[rows], pair.labels[rows], decided)
        result = compare_predictions(
            part.given_a, part.given_b, part.labels, task=part.task, metric=metric, scores=scale, resamples=400
        )
        settings = with_seeds(result, part.disagreements)
        found.append(((result.p_value or 0) <= LEVEL, (settings.p_value or 0) <= LEVEL))
    return found


def seed_correlation(pairs: list[Pair]) -> tuple[float, float]:
    """Correlation of changes between seeds, from the whole pool, and the mean share of rows on which two seeds disagree.

    Of D rows decided differently b go one way and c the other; (b - c)^2 is D (1 + r (D - 1)) on average.
    """
    squares = rows = products = total = 0.0
    for pair in pairs:
        a, b = (given.argmax(axis=1) if given.ndim == 2 else given for given in (pair.given_a, pair.given_b))
        gap = int((a == pair.labels).sum()) - int((b == pair.labels).sum())
        swapped = int(((a == pair.labels) != (b == pair.labels)).sum())
        squares, rows, products = squares + gap**2, rows + swapped, products + swapped * (swapped - 1)
        total += pair.disagreements / len(pair.labels)
    return (squares - rows) / products if products else 0.0, total / len(pairs)


def report(sides: list[Any], split: str, args: argparse.Namespace) -> None:
    """The table, one line a metric."""
    right = np.array([(s.given.argmax(axis=1) == s.labels).mean() for s in sides if s.given.ndim == 2])
    pool = len(sides[0].keys)
    print(f"{len(sides)} seeds of one config, pool of {pool:,} {split} rows")
    pairs = [pair_sides(a, b, split=split) for a, b in itertools.combinations(sides, 2)]
    correlation, share = seed_correlation(pairs)
    if len(right):
        print(f"accuracy {right.mean():.3f}, standard deviation between seeds {right.std(ddof=1):.4f}")
    print(f"two seeds disagree on {share:.1%} of the rows; correlation of the changes {correlation:.4f}")
    random = np.random.default_rng(0)
    for held_out in args.held_out:
        size = min(held_out, pool)
        sets = [random.choice(pool, size=size, replace=False) for _ in range(args.resamples)]
        print(f"\n{len(pairs)} pairs x {len(sets)} held-out sets of {size} rows: called different")
        print(f"  {'metric':<14}{'these two models':>18}{'their settings':>16}{'worst pair':>12}")
        for metric in args.metric:
            alarms = np.array([count_alarms(pair, metric, sets) for pair in pairs])
            models, settings = alarms[..., 0].mean(), alarms[..., 1].mean()
            worst = alarms[..., 1].mean(axis=1).max()
            print(f"  {metric:<14}{models:>17.1%} {settings:>15.1%} {worst:>11.0%}", flush=True)


def main() -> None:
    """Trains what is missing, then tests every pair."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rows", type=int, default=500, help="training rows of the tiny table")
    parser.add_argument("--pool", type=int, default=3000, help="held-out rows of the tiny table")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--held_out", type=int, nargs="+", default=[200, 400, 1500])
    parser.add_argument("--resamples", type=int, default=40)
    parser.add_argument("--metric", nargs="+", default=["accuracy", "f1_macro"])
    parser.add_argument("--model")
    parser.add_argument("--learning_rate")
    parser.add_argument("--flags", default="", help="more flags of `tunesmith train`, in quotes")
    parser.add_argument("--train_file")
    parser.add_argument("--test_file")
    parser.add_argument("--folder", help="keep the runs here, and use those that are there")
    args = parser.parse_args()
    if (args.train_file is None) != (args.test_file is None):
        parser.error("give --train_file and --test_file together")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report(load_sides(train_seeds(args, folder), "test"), "test", args)


if __name__ == "__main__":
    main()
