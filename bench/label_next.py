"""Compare chosen examples to label next with random ones, and count how often the forecast intervals are right.

    .venv/bin/python bench/label_next.py [--tasks trec news6 ...] [--seeds 5] [--output FILE]

The learner is a linear probe on frozen features of paraphrase-MiniLM-L3-v2, not a fine-tuned model. It starts with 200 random
labels; the pool is up to 1,000 other training examples. "Gain" is the test accuracy with 50 chosen examples minus that with 50
random ones (mean of five draws). A forecast is covered if the gain of 50, 200 and 500 more random labels is in its interval; the
realized gain includes the sampling noise of the test set.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, SHARED, write_record
from tunesmith.labels import LabelMap
from tunesmith.models.files import load_tokenizer
from tunesmith.pipeline.audit import embed_rows
from tunesmith.pipeline.label_next import (
    MOST_CANDIDATES,
    STRENGTH,
    choose_examples,
    forecast_gain,
    group_duplicates,
    measure_curve,
    scale_features,
    uncertainty,
)
from tunesmith.pipeline.train import RunObserver

MODEL = SHARED.parent / "models" / "paraphrase-MiniLM-L3-v2"
DEVELOPMENT = ("cr", "mrpc")
TASKS = ("trec", "news6", "r8", "subj", "sick")
START, NEXT, POOL, MOST_TEST, DRAWS = 200, 50, 1_000, 1_000, 5
MORE = (50, 200, 500)


def read_features(task: str) -> tuple[Any, Any, Any, Any, Any]:
    """Return features and ids of train and test, and the training texts by column; features are kept in scratch/label_next."""
    suffix = "_entailment" if task == "sick" else ""
    rows: dict[str, list[list[str]]] = {}
    for split, most in (("train", START + POOL + max(MORE)), ("test", MOST_TEST)):
        with open(SHARED / task / f"{split}{suffix}.tsv", encoding="utf-8", newline="") as lines:
            head, *found = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        order = np.random.default_rng(0).permutation(len(found))[:most]
        rows[split] = [found[i] for i in order]
    label = head.index("label")
    text = [i for i, name in enumerate(head) if name in ("text", "sentence", "sentence1", "sentence2", "question")]
    text = text or [i for i in range(len(head)) if i != label][:2]
    names = sorted({row[label] for row in rows["train"]})
    ids = {split: np.array([names.index(row[label]) for row in some]) for split, some in rows.items()}
    file = ROOT / "scratch" / "label_next" / f"{task}.npz"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer, labels = load_tokenizer(MODEL), LabelMap.for_classes(names)
        texts = {split: [[row[i] for i in text] for row in some] for split, some in rows.items()}
        found_features = {
            split: embed_rows(MODEL, tokenizer, labels, some, RunObserver()) for split, some in texts.items()
        }
        np.savez(file, **found_features)
    stored = np.load(file)
    columns = [[row[i] for row in rows["train"]] for i in text]
    return stored["train"], ids["train"], stored["test"], ids["test"], columns


def fit(features: Any, ids: Any) -> Any:
    """Return a fitted linear probe."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=STRENGTH, max_iter=1_000).fit(features, ids)


def measure(task: str, seed: int) -> dict[str, Any]:
    """Return the gain of chosen over random examples in points, and the forecasts with the realized gains."""
    train, ids, test, test_ids, columns = read_features(task)
    both = scale_features(np.concatenate([train, test]))
    train_x, test_x = both[: len(train)], both[len(train) :]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(train))
    start, pool = order[:START], order[START : START + POOL]

    def score(rows: Any) -> float:
        return 100 * float((fit(train_x[rows], ids[rows]).predict(test_x) == test_ids).mean())

    first = score(start)
    probabilities = fit(train_x[start], ids[start]).predict_proba(train_x[pool])
    groups = group_duplicates(*([[column[i] for i in rows] for column in columns] for rows in (start, pool)))
    free = np.flatnonzero(groups >= START)
    likely = free[np.argsort(-uncertainty(probabilities[free]), kind="stable")][: MOST_CANDIDATES * NEXT]
    vectors = train[pool[likely]] / np.linalg.norm(train[pool[likely]], axis=1, keepdims=True)
    chosen = pool[likely[choose_examples(uncertainty(probabilities[likely]), vectors, groups[likely], NEXT)]]
    random = [score(np.concatenate([start, rng.choice(pool, NEXT, replace=False)])) for _ in range(DRAWS)]
    curve = measure_curve(train[start], ids[start], seed=seed)
    forecasts = []
    for more in MORE:
        if START + more <= len(order):
            found = forecast_gain(curve, START, more, seed=seed)
            forecasts.append({**vars(found), "realized": score(order[: START + more]) - first})
    gain = score(np.concatenate([start, chosen])) - float(np.mean(random))
    return {"task": task, "seed": seed, "start": first, "random": float(np.mean(random)), "gain": gain, "of": forecasts}


def interval(values: list[list[float]]) -> tuple[float, float, float]:
    """Return the mean over tasks and a 95% bootstrap interval over tasks and seeds."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(4_000):
        tasks = [values[i] for i in rng.integers(len(values), size=len(values))]
        drawn.append(np.mean([np.mean(rng.choice(task, len(task))) for task in tasks]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.mean([np.mean(task) for task in values])), float(low), float(high)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=(*DEVELOPMENT, *TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = [measure(task, seed) for task in args.tasks for seed in range(args.seeds)]
    gains = []
    print("| Task | Accuracy with 200 | With 50 random more | Chosen minus random (points) | Intervals that cover |")
    print("|---|---:|---:|---:|---:|")
    for task in args.tasks:
        some = [one for one in results if one["task"] == task]
        gains.append([one["gain"] for one in some])
        forecasts = [one for row in some for one in row["of"]]
        covered = sum(one["low"] <= one["realized"] <= one["high"] for one in forecasts)
        means = [f"{np.mean([one[name] for one in some]):.1f}" for name in ("start", "random")]
        print(f"| {task} | {' | '.join(means)} | {np.mean(gains[-1]):+.2f} | {covered} of {len(forecasts)} |")
    mean, low, high = interval(gains)
    print(f"\nChosen minus random: {mean:+.2f} points (95% interval {low:+.2f} to {high:+.2f})")
    for more in MORE:
        some = [one for row in results for one in row["of"] if one["more"] == more]
        covered = sum(one["low"] <= one["realized"] <= one["high"] for one in some)
        error = np.mean([one["gain"] - one["realized"] for one in some])
        width = np.mean([one["high"] - one["low"] for one in some])
        print(f"{more} more: {covered} of {len(some)} intervals cover; mean error {error:+.2f}, mean width {width:.2f}")
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
