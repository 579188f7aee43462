"""How often `--max_error` is exceeded on new examples, and how much coverage it costs compared with the best threshold.

    OMP_NUM_THREADS=1 python bench/abstain.py --output docs/research/measurements/abstain.json

Trains one small model per task (kept in scratch/abstain), pools its predictions for up to 4,000 test examples, and draws 200
random halves: the threshold is chosen on one half and judged on the other. Limits are a quarter, half and three quarters of the
error rate of the model. "Known threshold" is the best of 100 fixed thresholds, each tested once on the calibration half.
"Best possible" is the lowest threshold that satisfies the limit on the half it is judged on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from common import ROOT, write_record
from gold_labels import SHARED, read_task, write
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import DataError
from tunesmith.metrics.calibration import HeldOut, choose_thresholds, coverage_curve
from tunesmith.pipeline.train import RunObserver, finetune
from tunesmith.report.predictions import make_predictions
from tunesmith.runs.folder import RunDir, read_summary

TASKS = ("cr", "subj", "trec", "sick_entailment", "mrpc")
SHARES = (0.25, 0.5, 0.75)
DRAWS = 200
TRAIN, TEST = 1000, 4000


def trained(task: str, model: str) -> HeldOut:
    """Return the test predictions of a model, trained unless its run folder is there."""
    folder = ROOT / "scratch" / "abstain" / task
    if not (folder / "run" / "predictions.parquet").is_file():
        columns, rows = read_task(task, 0)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {"train": rows[:TRAIN], "test": rows[TRAIN : TRAIN + TEST]}
        files = {
            f"{name}_file": write(folder / f"{name}.csv", part, [*columns, "label"]) for name, part in parts.items()
        }
        options: dict[str, Any] = {
            "model_name_or_path": model,
            "text_column_names": tuple(columns),
            "recipe": "hf",
            "num_train_epochs": 3,
            "learning_rate": 2e-4,
            "per_device_train_batch_size": 16,
            "max_seq_length": 96,
            "validation_split_fraction": 0.0,
        }
        finetune(observer=RunObserver(pages=False), output_dir=str(folder / "run"), use_cpu=True, **files, **options)
    run = RunDir(folder / "run")
    rows = make_predictions(read_prediction_columns(run.predictions_file), read_summary(run.data_summary_file))
    assert rows is not None
    assert rows.probabilities is not None
    return HeldOut.of(rows.probabilities, rows.predicted, rows.labels)


def part(examples: HeldOut, some: Any) -> HeldOut:
    """Return a subset."""
    return HeldOut(examples.confidence[some], examples.predicted[some], examples.correct[some])


def judge(task: str, pool: HeldOut, share: float) -> dict[str, Any]:
    """Draw halves and return how often the limit is exceeded, and mean coverages; a refused split answers nothing."""
    limit, size = round(share * float(1 - pool.correct.mean()), 4), len(pool.correct)
    rng = np.random.default_rng(0)
    exceeded, refused, covered, best = 0, 0, np.zeros(DRAWS), np.zeros(DRAWS)
    known = np.quantile(pool.confidence, np.linspace(0, 0.99, 100))
    by_known = np.zeros((DRAWS, len(known)))
    for draw in range(DRAWS):
        order = rng.permutation(size)
        chosen_on, judged = part(pool, order[: size // 2]), part(pool, order[size // 2 :])
        best[draw] = max((share for share, error in coverage_curve(judged) if error <= limit), default=0.0)
        answered = chosen_on.confidence[:, None] >= known
        passes = binom.cdf((answered & ~chosen_on.correct[:, None]).sum(0), answered.sum(0), limit) <= 0.05
        by_known[draw] = passes * (judged.confidence[:, None] >= known).mean(0)
        try:
            threshold = choose_thresholds(chosen_on, limit, ("",) * (int(pool.predicted.max()) + 1)).thresholds[0]
        except DataError:
            refused += 1
            continue
        answered = judged.confidence >= threshold
        exceeded += bool(answered.any() and (~judged.correct[answered]).mean() > limit)
        covered[draw] = answered.mean()
    coverages = {"coverage": covered.mean(), "known_threshold": by_known.mean(0).max(), "best_possible": best.mean()}
    return {
        "task": task,
        "calibration_examples": size // 2,
        "error": round(float(1 - pool.correct.mean()), 4),
        "limit": limit,
        "exceeded": exceeded,
        "refused": refused,
        "draws": DRAWS,
        **{name: round(float(value), 4) for name, value in coverages.items()},
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--model", default=str(SHARED / "models" / "paraphrase-MiniLM-L3-v2"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = [judge(task, trained(task, args.model), share) for task in args.tasks for share in SHARES]
    print(
        "| Task | Calibration examples | Error rate | Limit | Exceeded | Refused | Coverage | Known threshold | Best possible |"
    )
    print(f"|---|{'---:|' * 8}")
    for one in results:
        shown = [one["task"], f"{one['calibration_examples']:,}", f"{one['error']:.1%}", f"{one['limit']:.1%}"]
        shown += [one["exceeded"], one["refused"]]
        shown += [f"{one[name]:.2f}" for name in ("coverage", "known_threshold", "best_possible")]
        print(f"| {' | '.join(map(str, shown))} |")
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
