"""How often `--max_error` is exceeded on new examples, and how much coverage it costs compared with the best threshold.

    .venv/bin/python bench/abstain.py [--tasks cr subj ...] [--output FILE]

Trains one model per task (kept in scratch/abstain), pools its predictions for the test examples, and draws 200 random halves:
the threshold is chosen on one half and judged on the other. "Best possible" is the loosest threshold that satisfies the limit
on the half it is judged on. Limits are multiples of the model's own error rate.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, SHARED, write_record
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import DataError
from tunesmith.metrics.calibration import HeldOut, choose_thresholds, coverage_curve
from tunesmith.pipeline.train import finetune
from tunesmith.report.predictions import make_predictions
from tunesmith.runs.folder import RunDir, read_summary

TASKS = {
    "cr": ("cr/train.tsv", "cr/test.tsv"),
    "subj": ("subj/train.tsv", "subj/test.tsv"),
    "news6": ("news6/train.tsv", "news6/test.tsv"),
    "r8": ("r8/train.tsv", "r8/test.tsv"),
    "mrpc": ("mrpc/train.tsv", "mrpc/test.tsv"),
    "sick": ("sick/train_entailment.tsv", "sick/test_entailment.tsv"),
}
SHARES = (0.25, 0.5, 0.75)
DRAWS = 200


def trained(task: str, examples: int) -> HeldOut:
    """Return the test predictions of a model, trained unless its run folder is there."""
    folder = ROOT / "scratch" / "abstain" / task
    train, test = (str(SHARED / name) for name in TASKS[task])
    if not (folder / "predictions.parquet").is_file():
        options: dict[str, Any] = {
            "max_train_samples": examples,
            "num_train_epochs": 3,
            "learning_rate": 1e-4,
            "skip_bad_rows": True,
        }
        finetune(train_file=train, test_file=test, output_dir=str(folder), use_cpu=True, **options)
    run = RunDir(folder)
    rows = make_predictions(read_prediction_columns(run.predictions_file), read_summary(run.data_summary_file))
    assert rows is not None
    assert rows.probabilities is not None
    return HeldOut.of(rows.probabilities, rows.predicted, rows.labels)


def part(examples: HeldOut, some: np.ndarray[Any, Any]) -> HeldOut:
    """Return a subset."""
    return HeldOut(examples.confidence[some], examples.predicted[some], examples.correct[some])


def judge(task: str, pool: HeldOut, share: float) -> dict[str, Any]:
    """Draw halves and return how often the limit is exceeded, and the coverage."""
    limit = round(share * float(1 - pool.correct.mean()), 4)
    rng = np.random.default_rng(0)
    exceeded, covered, best, refused = 0, list[float](), list[float](), 0
    for _ in range(DRAWS):
        order = rng.permutation(len(pool.correct))
        chosen_on, judged = part(pool, order[: len(order) // 2]), part(pool, order[len(order) // 2 :])
        try:
            threshold = choose_thresholds(chosen_on, limit, ("",) * (int(pool.predicted.max()) + 1)).thresholds[0]
        except DataError:
            refused += 1
            continue
        answered = judged.confidence >= threshold
        exceeded += bool(answered.any() and (~judged.correct[answered]).mean() > limit)
        covered.append(float(answered.mean()))
        best.append(max((share for share, error in coverage_curve(judged) if error <= limit), default=0.0))
    return {
        "task": task,
        "examples": len(pool.correct),
        "error": round(float(1 - pool.correct.mean()), 4),
        "limit": limit,
        "exceeded": exceeded,
        "refused": refused,
        "draws": DRAWS,
        "coverage": round(float(np.mean(covered)), 4) if covered else None,
        "best_possible": round(float(np.mean(best)), 4) if best else None,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--examples", type=int, default=1500, help="training examples per task")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = [judge(task, trained(task, args.examples), share) for task in args.tasks for share in SHARES]
    print("| Task | Test examples | Error rate | Limit | Exceeded | Refused | Coverage | Best possible |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for one in results:
        shown = [one["task"], one["examples"], f"{one['error']:.3f}", f"{one['limit']:.3f}"]
        shown += [f"{one['exceeded']} of {one['draws']}", one["refused"], one["coverage"], one["best_possible"]]
        print(f"| {' | '.join(map(str, shown))} |")
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
