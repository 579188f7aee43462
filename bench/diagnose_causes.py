"""How runs are made on purpose for bench/diagnose_runs.py: the causes, their data, and one training run kept small on disk."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[2] / "shared"
SAMPLE = Path(__file__).parents[1] / "src" / "tunesmith" / "sample"
MODELS = {"L3": "paraphrase-MiniLM-L3-v2", "G": "granite-embedding-30m-english"}
RATE = 1e-4
"""Encoders of 3 and 6 layers want more than the 5e-5 of base-size ones: at 5e-5 three epochs of granite were too few."""
KEPT = {"journal.jsonl", "run.yaml", "metrics.json", "data_summary.json", "predictions.parquet", "made.json"}
"""What stays of a run folder; weights and pages would take 200 MB a run."""


@dataclass(frozen=True)
class Cell:
    """One model on one data set: rows and epochs of its usual run, rows of the cheap bad ones, seeds, causes left out."""

    model: str
    data: str
    rows: int
    epochs: int
    seeds: int
    bad_rows: int = 0
    without: tuple[str, ...] = ()
    later_without: tuple[str, ...] = ()
    """Causes left out from seed 2 on."""


EXTRA = ("healthy_low_rate", "healthy_batch_32", "healthy_more_rows")
LONG = ("12_epochs", "batch_1", "shuffled_long", "healthy_low_rate")
PAIRS = (*EXTRA, *LONG, "healthy", "reference_third", "rate_x0.01")
CELLS = (
    Cell("L3", "trec", 900, 4, 4, later_without=(*LONG, "healthy_more_rows")),
    Cell("G", "trec", 480, 4, 4, 0, ("healthy_more_rows",), LONG),
    Cell("L3", "sample", 3192, 3, 4, 640, (*EXTRA, "shuffled_long"), ("healthy", "batch_1", "rate_x0.01")),
    Cell("L3", "mrpc", 2000, 3, 2, 640, PAIRS),
    Cell("G", "sample", 2000, 3, 2, 480, PAIRS),
    Cell("G", "mrpc", 1500, 3, 2, 320, (*PAIRS, "shuffled")),
)
"""A pair of sentences costs 2 to 5 times a question of TREC, granite 2.5 times MiniLM-L3: fewer rows and seeds there."""


@dataclass(frozen=True)
class Cause:
    """One way to run. `right`: verdicts that name the cause. `rows`, `epochs`, `rate`: times the usual ones of the cell.

    `cheap`: made from `bad_rows` of the cell and compared with the usual settings on those rows (`reference`).
    """

    right: tuple[str, ...]
    rate: float = 1.0
    epochs: float | None = None
    rows: float = 1.0
    cheap: bool = True
    shuffled: bool = False
    part: float | None = None
    """Share of the whole data set, whatever the rows of the cell are."""
    options: dict[str, Any] = field(default_factory=dict)


SHORT = ("stopped_too_early", "underfitting", "overfitting")
"""What too few rows bring about: too few steps, or the few known by heart."""
CAUSES = {
    "healthy": Cause(("healthy",), cheap=False),
    "reference": Cause(SHORT),
    "rate_x30": Cause(("diverged", "erratic"), rate=30),
    "rate_x0.01": Cause(("underfitting",), rate=0.01),
    "frozen": Cause(("underfitting",), options={"freeze": ("encoder",)}),
    "few_rows": Cause(SHORT, part=0.02),
    "shuffled": Cause(("data_problem",), shuffled=True),
    "12_epochs": Cause(("overfitting",), epochs=12),
    "batch_1": Cause(("erratic", "diverged"), rows=1 / 3, options={"per_device_train_batch_size": 1}),
    "reference_third": Cause(SHORT, rows=1 / 3),
    "healthy_low_rate": Cause(("healthy",), rate=0.6, epochs=6, cheap=False),
    "healthy_batch_32": Cause(("healthy",), rate=1.5, cheap=False, options={"per_device_train_batch_size": 32}),
    "healthy_more_rows": Cause(("healthy",), rows=1.6, cheap=False),
    "shuffled_long": Cause(("data_problem",), epochs=10, rows=0.6, shuffled=True),
}
"""`reference` (usual settings on the rows of the bad runs) and `reference_third` are there to be compared with, and are
themselves short of rows where the healthy run of all rows is better."""

Key = tuple[str, str, str, int]


def name_run(key: Key) -> str:
    """The folder name of a run."""
    return "-".join(map(str, key))


def list_runs(seeds: Sequence[int] | None = None) -> list[Key]:
    """(model, data, cause, seed) of every run: an even and an odd seed together, so that a stopped bench is balanced."""
    found: list[Key] = []
    for cell in CELLS:
        for seed in range(cell.seeds) if seeds is None else seeds:
            left_out = cell.without if seed < 2 else (*cell.without, *cell.later_without)
            # On TREC the healthy run has the rows of all others and is their reference.
            found += [
                (cell.model, cell.data, cause, seed)
                for cause in CAUSES
                if cause not in left_out and (cause != "reference" or cell.bad_rows)
            ]
    # What takes longest comes last: a healthy run on pairs takes as long as five others.
    return sorted(found, key=lambda key: (key[2] == "healthy" and key[1] != "trec", key[3] // 2))


def find_cell(model: str, data: str) -> Cell:
    """The cell of a run."""
    return next(cell for cell in CELLS if (cell.model, cell.data) == (model, data))


def name_reference(key: Key) -> str | None:
    """The cause whose run this one is measured against; None for the healthy ones."""
    model, data, cause, _ = key
    if cause.startswith(("healthy", "reference")):
        return None if cause.startswith("healthy") else "healthy"
    if find_cell(model, data).bad_rows:
        return "reference_third" if cause in ("batch_1", "12_epochs") else "reference"
    return "reference_third" if cause == "batch_1" else "healthy"


@cache
def read_rows(name: str, split: str) -> tuple[dict[str, Any], ...]:
    """Rows of a split, of ../shared or of the embedded sample."""
    if name == "sample":
        with open(SAMPLE / f"{split}.csv", encoding="utf-8", newline="") as file:
            return tuple(csv.DictReader(file))
    import pyarrow.parquet as pq

    return tuple(pq.read_table(SHARED / "data" / name / f"{split}.parquet").drop_columns(["idx"]).to_pylist())


def count_rows(key: Key) -> int:
    """The training rows of a run."""
    model, data, name, _ = key
    cell, cause = find_cell(model, data), CAUSES[name]
    if cause.part:
        return round(len(read_rows(data, "train")) * cause.part)
    share = (
        1 / 3 if name == "12_epochs" and cell.bad_rows else cause.rows
    )  # pairs cost more, and are learnt by heart sooner
    return round((cell.bad_rows if cause.cheap and cell.bad_rows else cell.rows) * share)


def make_data(key: Key) -> dict[str, list[dict[str, Any]]]:
    """Train, validation and test rows. TREC has no validation split: 400 training rows are held out."""
    _, data, name, seed = key
    cause = CAUSES[name]
    pick = random.Random(seed)
    train = list(read_rows(data, "train"))
    pick.shuffle(train)
    held = list(read_rows(data, "validation"))[:400] if data != "trec" else train[:400]
    train = train[400:] if data == "trec" else train
    wanted = count_rows(key)
    train, left = train[:wanted], train[wanted:]
    # 2% of TREC may hold no row of its rarest class (86 of 5,452), and a label unknown to train is refused.
    for label in sorted({row["label"] for row in left} - {row["label"] for row in train}):
        train[-1] = next(row for row in left if row["label"] == label)
    if cause.shuffled:
        for rows in (train, held):
            labels = [row["label"] for row in rows]
            pick.shuffle(labels)
            rows[:] = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    return {"train": train, "validation": held, "test": list(read_rows(data, "test"))[:600]}


def make_options(key: Key) -> dict[str, Any]:
    """The options of a run. The last weights are scored, not the best ones: harm done late must show."""
    model, data, name, seed = key
    cell, cause = find_cell(model, data), CAUSES[name]
    return {
        "learning_rate": RATE * cause.rate,
        "num_train_epochs": float(cause.epochs or cell.epochs),
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "max_seq_length": 64,
        "train_sample_size": 128,
        "bf16": True,  # 1.4 times as fast as float32 on the processor this was made on, with the same losses
        "load_best_model_at_end": False,
        "seed": seed,
        **cause.options,
    }


def train_once(folder: Path, key: Key, options: dict[str, Any], *, evaluated: bool = True) -> None:
    """Trains into `folder` and keeps what a verdict and a score need; without `evaluated`, a score alone."""
    import tunesmith.finetune.running as running
    from tunesmith.errors import NumericsError
    from tunesmith.finetune import finetune

    running.draw_and_explain = lambda run: []  # pictures are not looked at here, and take seconds
    shutil.rmtree(folder, ignore_errors=True)
    data, began, ended = make_data(key), time.time(), "completed"
    saved = {} if options["load_best_model_at_end"] else {"save_strategy": "no"}
    if saved and not evaluated:
        saved["eval_strategy"] = "no"
    try:
        finetune(
            train_data=data["train"],
            validation_data=data["validation"],
            test_data=data["test"],
            model_name_or_path=str(SHARED / "models" / MODELS[key[0]]),
            output_dir=str(folder),
            **(options | saved),
        )
    except NumericsError:
        ended = "NumericsError"
    made = {"key": key, "options": options, "ended": ended, "seconds": round(time.time() - began, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made.json").write_text(json.dumps(made))
    for path in folder.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_test(folder: Path) -> tuple[list[float], list[bool]]:
    """Log loss and rightness of each test row, in row order; both empty when the run was lost."""
    import pyarrow.parquet as pq

    file = folder / "predictions.parquet"
    if not file.exists():
        return [], []
    rows = [row for row in pq.read_table(file).to_pylist() if row["split"] == "test"]
    losses = [-math.log(max(1e-7, row[f"prob_{row['label']}"])) for row in rows]
    return losses, [row["label"] == row["prediction"] for row in rows]
