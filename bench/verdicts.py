"""Compare verdicts of the diagnosis on small training runs with those that a person wrote down beforehand.

    python bench/verdicts.py RUNS --make      # train the missing runs (20 minutes on one core)
    python bench/verdicts.py RUNS --curves    # curves without verdicts: judge them yourself
    python bench/verdicts.py RUNS --output docs/research/measurements/verdicts.json     # the table of docs/research/diagnosis.md

Training labels may be wrong; validation labels are always correct, except in two runs that say so.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
HELD_OUT = 120
HF: dict[str, Any] = {"recipe": "hf", "per_device_train_batch_size": 16, "learning_rate": 1e-4}
LAST = {"load_best_model_at_end": False}


@dataclass(frozen=True)
class Run:
    """One training run; `person` lists the verdicts that a person accepts, best first, written before seeing the diagnosis."""

    task: str
    rows: int
    person: str
    options: dict[str, Any] = field(default_factory=dict)
    wrong: float = 0.0
    """Share of wrong training labels."""
    change: str = ""
    """shuffled: all labels, including validation. swapped: validation labels. rare: one class is rare."""


RUNS = {
    "cr-auto": Run("cr", 240, "healthy|calibration_drift"),
    "sick-20-epochs-last": Run("sick_relatedness", 240, "overfitting", {**HF, **LAST, "num_train_epochs": 20}),
    "cr-12-epochs-last": Run("cr", 200, "overfitting", {**HF, **LAST, "num_train_epochs": 12}),
    "trec-noise-40": Run("trec", 300, "label_noise", {**HF, "num_train_epochs": 6}, 0.4),
    "subj-noise-40-auto": Run("subj", 240, "label_noise|overfitting", {}, 0.4),
    "cr-rare": Run("cr", 240, "underfitting|class_ignored", {**HF, "num_train_epochs": 2}, change="rare"),
    "r8-solved": Run("r8", 160, "class_ignored|underfitting", {**HF, "num_train_epochs": 5}, change="two"),
    "mrpc-hf": Run("mrpc", 240, "underfitting|class_ignored", {"recipe": "hf"}),
    "trec-high-rate": Run("trec", 240, "diverged", {**HF, "learning_rate": 1e-2, "num_train_epochs": 3}),
    "trec-low-rate": Run("trec", 240, "underfitting", {**HF, "learning_rate": 1e-6, "num_train_epochs": 3}),
    "subj-1-epoch": Run("subj", 100, "underfitting|stopped_too_early", {**HF, "num_train_epochs": 1}),
    "trec-1-epoch": Run("trec", 240, "underfitting|stopped_too_early", {**HF, "num_train_epochs": 1}),
    "subj-shuffled": Run("subj", 240, "no_signal|label_noise", {**HF, "num_train_epochs": 4}, change="shuffled"),
    "subj-swapped": Run("subj", 240, "split_mismatch", {**HF, "num_train_epochs": 3}, change="swapped"),
    "cr-noise-40": Run("cr", 300, "label_noise", {**HF, "num_train_epochs": 5}, 0.4),
    "subj-10-epochs": Run("subj", 200, "healthy|calibration_drift", {**HF, "num_train_epochs": 10}),
    "mrpc-10-epochs-last": Run("mrpc", 240, "overfitting", {**HF, **LAST, "num_train_epochs": 10}),
    "subj-frozen": Run("subj", 240, "underfitting", {**HF, "num_train_epochs": 2, "freeze": ("encoder",)}),
    "sick-entailment": Run("sick_entailment", 300, "underfitting|stopped_too_early", {**HF, "num_train_epochs": 4}),
    "trec-auto": Run("trec", 240, "healthy"),
    "subj-noise-20": Run("subj", 240, "healthy|label_noise", {**HF, "num_train_epochs": 3}, 0.2),
    "trec-small-batch": Run(
        "trec",
        160,
        "erratic|stopped_too_early",
        {**HF, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "num_train_epochs": 2},
    ),
    "news6-hf": Run("news6", 160, "stopped_too_early|underfitting", {**HF, "num_train_epochs": 4}),
    "subj-auto": Run("subj", 240, "healthy|calibration_drift"),
    "subj-noise-40-last": Run("subj", 200, "overfitting|label_noise", {**HF, **LAST, "num_train_epochs": 10}, 0.4),
    "r8-auto": Run("r8", 200, "healthy|class_ignored"),
    "sick-relatedness-auto": Run("sick_relatedness", 300, "overfitting|healthy"),
    "news6-noise-40-auto": Run("news6", 300, "label_noise|overfitting", {}, 0.4),
    "sick-entailment-last": Run("sick_entailment", 300, "overfitting", {**HF, **LAST, "num_train_epochs": 12}),
    "trec-shuffled": Run("trec", 240, "no_signal|label_noise", {**HF, "num_train_epochs": 6}, change="shuffled"),
}


def read_table(file: Path) -> list[dict[str, str]]:
    """Return the rows of a TSV file without quotes."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if all(row.values())]


def make_data(run: Run, folder: Path) -> dict[str, str]:
    """Write train.csv and validation.csv and return the options that name them."""
    draw = random.Random(1)
    name, _, kind = run.task.partition("_")
    ending = f"_{kind}.tsv" if kind else ".tsv"
    train, held_out = (read_table(SHARED / "data" / name / (split + ending)) for split in ("train", "test"))
    label = "score" if kind == "relatedness" else "label"
    if run.change == "two":
        train, held_out = ([row for row in rows if row[label] in ("earn", "grain")] for rows in (train, held_out))
    draw.shuffle(train)
    draw.shuffle(held_out)
    if run.change == "rare":
        often = "positive"
        rare = [[row for row in rows if row[label] != often] for rows in (train, held_out)]
        train, held_out = ([row for row in rows if row[label] == often] for rows in (train, held_out))
        train[: run.rows // 20], held_out[: HELD_OUT // 20] = rare[0][: run.rows // 20], rare[1][: HELD_OUT // 20]
    train, held_out = train[: run.rows], held_out[:HELD_OUT]
    draw.shuffle(train)
    names = sorted({row[label] for row in train})
    for row in draw.sample(train, round(run.wrong * len(train))):
        row[label] = draw.choice([other for other in names if other != row[label]])
    if run.change == "shuffled":
        for rows in (train, held_out):
            labels = [row[label] for row in rows]
            draw.shuffle(labels)
            for row, value in zip(rows, labels, strict=True):
                row[label] = value
    if run.change == "swapped":
        for row in held_out:
            row[label] = names[(names.index(row[label]) + 1) % len(names)]
    columns = [column for column in train[0] if column not in ("idx", "id")]
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("validation", held_out)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    return {"train_file": str(folder / "train.csv"), "validation_file": str(folder / "validation.csv")}


def make_run(name: str, folder: Path, model: str) -> None:
    """Train one run."""
    import tunesmith

    run = RUNS[name]
    files = make_data(run, folder / "data" / name)
    small = {"max_seq_length": 40, "train_sample_size": 100}
    options = {
        "recipe": "auto",
        **small,
        "label_column_name": "score" if "relatedness" in run.task else "label",
        **run.options,
    }
    tunesmith.finetune(**files, model_name_or_path=model, output_dir=str(folder / name), disable_tqdm=True, **options)


def print_curves(name: str, folder: Path) -> None:
    """Print the curves of one run and what is known about its data, without a verdict."""
    from tunesmith import load_curves

    run, curves = RUNS[name], load_curves(folder / name)
    metric = "accuracy" if "accuracy" in curves.metric_names else "pearson"
    print(f"\n{name}: {run.rows} training examples, {run.options}, wrong labels {run.wrong:.0%} {run.change}")
    print(f"  chance {summary_of(folder / name).get('best_constant', {}).get('metrics', {})}; {curves.best()}")
    unseen = curves.metric("validation", "loss")
    for step, epoch, loss in zip(unseen.step, unseen.epoch, unseen.value, strict=True):
        parts = [
            at_step(curves.metric(split, key), step)
            for split in ("train_sample", "validation")
            for key in ("loss", metric)
        ]
        print(f"  epoch {epoch:5.1f}  train {parts[0]} {parts[1]}  validation {loss:.3f} {parts[3]}")


def at_step(series: Any, step: int) -> str:
    """Return the value of a series at a step as text."""
    found = series.value[series.step == step]
    return f"{found[0]:.3f}" if len(found) else "  -  "


def summary_of(run: Path) -> dict[str, Any]:
    """Return the data summary of a run."""
    from tunesmith.runs.folder import RunDir, read_summary

    return dict(read_summary(RunDir(run).data_summary_file))


def main() -> int:
    """Train, print the curves, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--output", type=Path, help="write the verdicts to this JSON file")
    parser.add_argument("--model", default=str(SHARED / "models" / "paraphrase-MiniLM-L3-v2"))
    args = parser.parse_args()
    for name in RUNS if args.make else ():
        if not (args.folder / name / "report.html").is_file():
            make_run(name, args.folder, args.model)
    from tunesmith.report.build import diagnose_run

    verdicts: dict[str, dict[str, Any]] = {}
    for name, run in RUNS.items() if not args.make else ():
        if not (args.folder / name / "report.html").is_file():
            continue
        if args.curves:
            print_curves(name, args.folder)
            continue
        first = diagnose_run(args.folder / name)[0]
        person = run.person.split("|")
        verdicts[name] = {
            "person": person,
            "verdict": first.code,
            "confidence": first.confidence,
            "agrees": first.code in person,
        }
        print(f"| {name} | {', '.join(person)} | {first.code} ({first.confidence:.0%}{first.doubt}) |")
    if verdicts:
        print(f"{sum(v['agrees'] for v in verdicts.values())} of {len(verdicts)} agree", file=sys.stderr)
    if args.output:
        args.output.write_text(json.dumps(verdicts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
