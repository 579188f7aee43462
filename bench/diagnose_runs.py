"""Runs made to fail on purpose, and what the diagnosis says of them: confusion matrix, false alarms, and whether advice helps.

    python bench/diagnose_runs.py --output /tmp/diagnose --seeds 3 --models paraphrase-MiniLM-L3-v2 --data trec
    python bench/diagnose_runs.py --output /tmp/diagnose --table        # only the table, from runs already made

Data and models come from ../shared. A run that is in --output already is not made again:
the bench can be stopped and gone on with.
Odd seeds are held out: thresholds may be chosen on even seeds only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[2] / "shared"
RATE = 5e-5


@dataclass(frozen=True)
class Cause:
    """One way to run. `right` are the verdicts that name the cause; the first is the one a person would give."""

    right: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    rows: float = 1.0
    shuffled: bool = False


CAUSES = {
    "healthy": Cause(("healthy",)),
    "healthy_2e-5": Cause(("healthy", "stopped_too_early"), {"learning_rate": 2e-5, "num_train_epochs": 5}),
    "rate_x30": Cause(("diverged", "erratic"), {"learning_rate": 30 * RATE}),
    "rate_x0.01": Cause(("underfitting",), {"learning_rate": 0.01 * RATE}),
    "frozen": Cause(("underfitting",), {"freeze": ("encoder",)}),
    "few_rows": Cause(("stopped_too_early", "underfitting", "overfitting"), rows=0.02),
    "shuffled": Cause(("data_problem",), shuffled=True),
    "shuffled_long": Cause(("data_problem",), {"num_train_epochs": 12}, shuffled=True),
    "12_epochs": Cause(("overfitting",), {"num_train_epochs": 12}),
    "batch_1": Cause(("erratic",), {"per_device_train_batch_size": 1}, rows=0.5),
}


@dataclass(frozen=True)
class Outcome:
    """What came of one run. `score` is the accuracy on the test rows, which neither training nor diagnosis has seen."""

    model: str
    data: str
    cause: str
    seed: int
    verdict: str
    evidence: str
    advice: tuple[str, ...]
    score: float
    followed: float | None = None


def read_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Rows of a split in ../shared, as dicts."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = (
        pq.read_table(SHARED / "data" / name / f"{split}.parquet").drop_columns(["idx"]).to_pylist()
    )
    return rows


def make_data(name: str, cause: Cause, *, seed: int, most: int) -> dict[str, list[dict[str, Any]]]:
    """Train, validation and test rows. TREC has no validation split: 500 training rows are held out."""
    pick = random.Random(seed)
    train = read_rows(name, "train")
    pick.shuffle(train)
    validation = (
        read_rows(name, "validation") if (SHARED / "data" / name / "validation.parquet").exists() else train[:500]
    )
    train = train if name == "mrpc" else train[500:]
    train = train[: max(60, int(min(most, len(train)) * cause.rows))]
    if cause.shuffled:
        validation = validation + train[: len(train) // 10]
        train = train[len(train) // 10 :]
        for rows in (train, validation):
            labels = [row["label"] for row in rows]
            pick.shuffle(labels)
            rows[:] = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    return {"train": train, "validation": validation, "test": read_rows(name, "test")}


def train_once(folder: Path, model: str, data: dict[str, Any], options: dict[str, Any]) -> float:
    """Trains into `folder`; gives the accuracy on the test rows, NaN when the run was lost."""
    from tunesmith.errors import NumericsError
    from tunesmith.finetune import finetune

    usual = {"learning_rate": RATE, "num_train_epochs": 3.0, "per_device_train_batch_size": 16}
    try:
        result = finetune(
            train_data=data["train"],
            validation_data=data["validation"],
            test_data=data["test"],
            model_name_or_path=str(SHARED / "models" / model),
            output_dir=str(folder),
            **(usual | options),
        )
    except NumericsError:
        return float("nan")
    return float(result.scores["test"]["accuracy"].value or 0.0)


def make_outcome(output: Path, model: str, data: str, cause: str, seed: int, *, most: int, follow: bool) -> Outcome:
    """One run, its verdict and, when asked, the same run with the first advice followed."""
    from tunesmith.config.convert import convert
    from tunesmith.config.schema import list_options
    from tunesmith.diagnose.verdict import advised_options
    from tunesmith.report.diagnosis import diagnose_run

    spec = CAUSES[cause]
    name = f"{model}-{data}-{cause}-{seed}"
    rows = make_data(data, spec, seed=seed, most=most)
    score = train_once(output / name, model, rows, {**spec.options, "seed": seed})
    found = diagnose_run(output / name)[0]
    followed = None
    changes = advised_options(found.advice[0]) if found.advice else {}
    if follow and found.code != "healthy" and changes:
        options = {**spec.options, "seed": seed} | {
            k: convert(v, list_options()[k].hint) for k, v in changes.items() if v is not None
        }
        options = {k: v for k, v in options.items() if changes.get(k, "") is not None}
        followed = train_once(output / f"{name}-followed", model, rows, options)
    return Outcome(model, data, cause, seed, found.code, found.evidence, found.advice, score, followed)


def print_table(outcomes: list[Outcome], title: str) -> None:
    """Confusion matrix of cause and verdict, and the three figures that count."""
    if not outcomes:
        return
    verdicts = sorted({o.verdict for o in outcomes})
    print(f"\n{title}: {len(outcomes)} runs\n{'cause':16}" + "".join(f"{v[:14]:>16}" for v in verdicts))
    for cause in CAUSES:
        row = Counter(o.verdict for o in outcomes if o.cause == cause)
        if row:
            print(f"{cause:16}" + "".join(f"{row[v] or '.':>16}" for v in verdicts))
    right = [o.verdict in CAUSES[o.cause].right for o in outcomes]
    well = [o for o in outcomes if o.cause.startswith("healthy")]
    alarms = [o for o in well if o.verdict not in CAUSES[o.cause].right]
    helped = [o.followed > o.score for o in outcomes if o.followed is not None and o.cause not in ("healthy",)]
    print(f"right {sum(right)}/{len(right)}; false alarms on healthy {len(alarms)}/{len(well)}", end="")
    print(f"; first advice improved the test score in {sum(helped)}/{len(helped)}" if helped else "")


def load_outcomes(file: Path) -> list[Outcome]:
    """The outcomes written so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Outcome(**{**data, "advice": tuple(data["advice"])}) for data in map(json.loads, lines)]


def plan(args: argparse.Namespace, done: set[tuple[str, str, str, int]]) -> Iterator[tuple[str, str, str, int]]:
    """The runs still to be made, seeds outermost, so that a stopped bench is balanced."""
    for seed in range(args.seeds):
        for model in args.models:
            for data in args.data:
                for cause in args.causes:
                    if (model, data, cause, seed) not in done:
                        yield model, data, cause, seed


def main() -> None:
    """Makes what is missing, prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["paraphrase-MiniLM-L3-v2", "granite-embedding-30m-english"])
    parser.add_argument("--data", nargs="+", default=["mrpc", "trec"])
    parser.add_argument("--causes", nargs="+", default=list(CAUSES), choices=list(CAUSES))
    parser.add_argument("--most", type=int, default=3000, help="training rows at most")
    parser.add_argument("--follow", action="store_true", help="make each unhealthy run again with its first advice")
    parser.add_argument("--table", action="store_true", help="make no run")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "outcomes.jsonl"
    outcomes = load_outcomes(file)
    if not args.table:
        for model, data, cause, seed in plan(args, {(o.model, o.data, o.cause, o.seed) for o in outcomes}):
            made = make_outcome(args.output, model, data, cause, seed, most=args.most, follow=args.follow)
            outcomes.append(made)
            with open(file, "a") as out:
                out.write(json.dumps({k: getattr(made, k) for k in made.__dataclass_fields__}) + "\n")
            print(f"{model} {data} {cause} {seed}: {made.verdict} ({made.evidence}) test {made.score:.3f}", flush=True)
    print_table([o for o in outcomes if o.seed % 2 == 0], "even seeds (thresholds may be chosen on these)")
    print_table([o for o in outcomes if o.seed % 2 == 1], "odd seeds (held out)")


if __name__ == "__main__":
    main()
