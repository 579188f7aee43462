"""Measure the coverage of the 95% confidence intervals, and false positives of the paired tests at 5%.

    python bench/interval_coverage.py [--simulations 4000] [--output docs/research/measurements/interval_coverage.json]

Each row draws datasets with a known true score and counts how often the interval of `tunesmith.metrics` contains it. `stress`
rows have a class with about four examples, or about four errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common import write_record
from tunesmith.labels import Task
from tunesmith.metrics.paired import compare_predictions
from tunesmith.metrics.table import Rows, metric_of, sums_of

Array = Any


def confusion(shares: list[float], recalls: list[float]) -> Array:
    """Return the true cell probabilities for these recalls; errors are spread by the shares of the other classes."""
    share, table = np.array(shares), np.zeros((len(shares), len(shares)))
    for i, right in enumerate(recalls):
        others = np.delete(share, i).sum()
        table[i] = share[i] * (1 - right) * share / others
        table[i, i] = share[i] * right
    return table


POPULATIONS = {
    "mrpc-like, 0.86": confusion([0.32, 0.68], [0.78, 0.90]),
    "mrpc-like, 0.80": confusion([0.32, 0.68], [0.60, 0.90]),
    "cola-like": confusion([0.31, 0.69], [0.55, 0.92]),
    "10% positive": confusion([0.90, 0.10], [0.95, 0.70]),
    "balanced, 0.92": confusion([0.50, 0.50], [0.92, 0.92]),
    "3 classes": confusion([0.30, 0.33, 0.37], [0.75, 0.80, 0.85]),
    "6 classes": confusion([0.08, 0.17, 0.13, 0.16, 0.21, 0.25], [0.80, 0.90, 0.88, 0.92, 0.90, 0.93]),
}
STRESS = {
    "stress: trec-like": confusion([0.018, 0.17, 0.13, 0.19, 0.21, 0.282], [0.80, 0.93, 0.97, 0.98, 0.95, 0.97]),
    "stress: 0.98 right": confusion([0.50, 0.50], [0.98, 0.98]),
}
COUNT_NAMES = ("accuracy", "f1", "f1_macro", "matthews_correlation", "balanced_accuracy", "f1_weighted")


def rows_of(counts: Array) -> Rows:
    """Return examples with these counts."""
    cells = np.repeat(np.arange(counts.size), counts.ravel())
    return Rows(cells // len(counts), cells % len(counts), None)


def count_rows(
    populations: dict[str, Array], sizes: tuple[int, ...], simulations: int, random: np.random.Generator
) -> Iterator[tuple[str, int, str, float, float, float]]:
    for label, truth in populations.items():
        k = len(truth)
        task = Task.BINARY if k == 2 else Task.MULTICLASS
        for n in sizes:
            draws = random.multinomial(n, truth.ravel(), size=simulations).reshape(-1, k, k)
            for name in COUNT_NAMES:
                if name == "f1" and k > 2:
                    continue
                metric = metric_of(name, task)
                assert metric.formula is not None
                target = float(metric.formula(*sums_of(truth * 1e9)))
                limits = np.array([(s.low, s.high) for s in map(metric.score, map(rows_of, draws))])
                yield label, n, name, target, *_coverage(limits, target)


def _coverage(limits: Array, target: float) -> tuple[float, float]:
    inside = (limits[:, 0] <= target) & (target <= limits[:, 1])
    return float(inside.mean()), float((limits[:, 1] - limits[:, 0]).mean())


def _normal(random: np.random.Generator, n: int) -> tuple[Array, Array]:
    x = random.standard_normal(n)
    return x, 0.9 * x + np.sqrt(1 - 0.81) * random.standard_normal(n)


def _stsb(random: np.random.Generator, n: int) -> tuple[Array, Array]:
    x = np.round(random.uniform(0, 5, n) * 5) / 5
    return x, np.clip(0.9 * x + 0.3 + 0.7 * random.standard_normal(n), 0, 5)


def _skewed(random: np.random.Generator, n: int) -> tuple[Array, Array]:
    x = random.standard_exponential(n)
    return x, x + 0.7 * random.standard_normal(n)


def value_rows(sizes: tuple[int, ...], simulations: int, random: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    makers: dict[str, Callable[[np.random.Generator, int], tuple[Array, Array]]] = {
        "normal": _normal,
        "stsb-like": _stsb,
        "skewed": _skewed,
    }
    for label, make in makers.items():
        big = make(random, 4_000_000)
        for n in sizes:
            samples = [make(random, n) for _ in range(simulations)]
            for name in ("pearson", "spearmanr", "mae", "r2"):
                metric = metric_of(name, Task.REGRESSION)
                target = metric.value(Rows(*big, None))
                scores = [metric.score(Rows(x, y, None)) for x, y in samples]
                limits = np.array([(s.low, s.high) for s in scores], float)
                yield label, n, name, target, *_coverage(limits, target)


def ranking_rows(sizes: tuple[int, ...], simulations: int, random: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    def make(n: int) -> Rows:
        labels = (random.random(n) < 0.3).astype(np.int64)
        margin = random.standard_normal(n) + 1.8 * labels
        chance = 1 / (1 + np.exp(-margin))
        return Rows(labels, (margin > 0).astype(np.int64), np.stack([1 - chance, chance], 1))

    big = make(2_000_000)
    for n in sizes:
        samples = [make(n) for _ in range(simulations)]
        for name in ("auroc", "average_precision", "log_loss"):
            metric = metric_of(name, Task.BINARY)
            target = metric.value(big)
            limits = np.array([(s.low, s.high) for s in map(metric.score, samples)], float)
            yield "30% positive", n, name, target, *_coverage(limits, target)


def false_positive_rows(simulations: int, random: np.random.Generator) -> Iterator[tuple[str, int, str, float]]:
    """Compare two equally good models (accuracy 0.86) and yield how often the test finds a difference."""
    for n in (200, 408, 1725):
        claimed = {"accuracy": 0, "f1": 0, "f1_macro": 0, "matthews_correlation": 0}
        for i in range(simulations):
            truth = (random.random(n) < 0.68).astype(np.int64)
            hard = random.random(n) < 0.2
            wrong = [np.where(hard, random.random(n) < 0.45, random.random(n) < 0.0625) for _ in range(2)]
            first, second = (np.where(w, 1 - truth, truth) for w in wrong)
            for name in claimed:
                result = compare_predictions(first, second, truth, task=Task.BINARY, metric=name, seed=i, resamples=400)
                claimed[name] += result.p_value is not None and result.p_value <= 0.05
        for name, count in claimed.items():
            yield "equal models", n, name, count / simulations


def main() -> None:
    """Print and write the coverage of every interval and the false positives of every paired test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    random, sizes, simulations = np.random.default_rng(options.seed), (200, 408, 1725), options.simulations
    results: list[dict[str, Any]] = []
    print("Population             n  Metric                   Truth  Coverage  Width")
    sources = (
        count_rows(POPULATIONS, sizes, simulations, random),
        value_rows(sizes, simulations, random),
        ranking_rows(sizes, simulations, random),
        count_rows(STRESS, sizes, simulations, random),
    )
    for label, n, name, target, covered, width in chain(*sources):
        print(f"{label:18} {n:5} {name:22} {target:7.4f} {covered:9.4f} {width:6.3f}", flush=True)
        results.append(
            {"population": label, "n": n, "metric": name, "coverage": round(covered, 4), "width": round(width, 4)}
        )
    usual = [row["coverage"] for row in results if not row["population"].startswith("stress")]
    print(f"{sum(0.94 <= c <= 0.96 for c in usual)} of {len(usual)} rows (without stress) within 0.94 to 0.96")
    for label, n, name, rate in false_positive_rows(max(simulations // 2, 1000), random):
        print(f"{label:18} {n:5} {name:22} false positives {rate:.4f}", flush=True)
        results.append({"population": label, "n": n, "metric": name, "false_positives": round(rate, 4)})
    write_record(options.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
