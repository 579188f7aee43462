"""Train students on the predictions of fold models, with and without unlabeled texts, and compare them with `--recipe auto`.

    OMP_NUM_THREADS=1 .venv/bin/python bench/distillation.py --tasks cr mrpc --seeds 1 --output distillation.json
    .venv/bin/python bench/distillation.py --table docs/research/measurements/distillation.json

For each task and seed, `auto` is trained on all labeled examples. Three fold models are trained on two thirds each. They predict
their held-out examples, and their mean predicts the unlabeled texts. A student `WEIGHT:TEMPERATURE` learns these probabilities,
mixed with the label where there is one. `folds` is the mean of the fold models on the test examples. The temperature of `best`
is fitted to the held-out logits and applied to `auto`. Test examples are those of the task and training rows that no model has
read. All runs use bf16 on one CPU thread; seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from common import ROOT, SHARED, write_record
from tunesmith.inference.predictor import Predictor
from tunesmith.labels import Task
from tunesmith.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of
from tunesmith.metrics.table import softmax
from tunesmith.pipeline.train import RunObserver, finetune

TASKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "cr": ("cr/train.tsv", "cr/test.tsv", ("text",)),
    "mrpc": ("mrpc/train.tsv", "mrpc/test.tsv", ("sentence1", "sentence2")),
    "trec": ("trec/train.tsv", "trec/test.tsv", ("text",)),
    "subj": ("subj/train.tsv", "subj/test.tsv", ("text",)),
    "news6": ("news6/train.tsv", "news6/test.tsv", ("text",)),
    "r8": ("r8/train.tsv", "r8/test.tsv", ("text",)),
    "sick": ("sick/train_entailment.tsv", "sick/test_entailment.tsv", ("premise", "hypothesis")),
}
"""The file with training examples, the file with test examples, and the text columns."""
MODEL = ROOT.parent / "shared" / "models" / "paraphrase-MiniLM-L3-v2"
FOLDS = 3
Rows = list[dict[str, str]]
Array = npt.NDArray[np.float64]


class Cell:
    """The labeled, unlabeled and test examples of a task and seed."""

    def __init__(self, args: argparse.Namespace, task: str, seed: int, folder: Path) -> None:
        train, test, self.texts = TASKS[task]
        rows, tests = read_rows(train), read_rows(test)
        random.Random(seed).shuffle(rows)
        random.Random(0).shuffle(tests)
        used = args.size + max(args.unlabeled)
        self.rows, self.seed, self.folder = rows[: args.size], seed, folder
        self.extra = [row for row in rows[args.size : used] if all(row[c].strip() for c in self.texts)]
        self.names = sorted({row["label"] for row in self.rows})
        self.test = [row for row in (tests + rows[used:])[: args.test_rows] if row["label"] in self.names]
        self.gold, self.test_gold = (
            np.array([self.names.index(row["label"]) for row in part]) for part in (self.rows, self.test)
        )
        self.auto: npt.NDArray[np.bool_] | None = None
        self.fold = np.empty(args.size, np.int64)  # stratified
        self.fold[np.argsort(self.gold, kind="stable")] = np.arange(args.size) % FOLDS

    def train(self, rows: Rows, targets: Array | None = None) -> tuple[Callable[[Rows], Array], float]:
        """Return a function from examples to logits, and the CPU seconds. `targets` are probabilities instead of labels."""
        run, file = self.folder / "run", self.folder / "train.csv"
        shutil.rmtree(run, ignore_errors=True)
        columns = ["label"] if targets is None else [f"p_{name}" for name in self.names]
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.writer(opened)
            writer.writerow([*self.texts, *columns])
            for at, row in enumerate(rows):
                writer.writerow(
                    [row[c] for c in self.texts]
                    + ([row["label"]] if targets is None else [f"{p:.6f}" for p in targets[at]])
                )
        began = process_time()
        finetune(
            train_file=str(file),
            label_column_name=",".join(columns),
            model_name_or_path=str(MODEL),
            output_dir=str(run),
            validation_split_fraction=0.0,
            load_best_model_at_end=False,
            eval_strategy="no",
            save_strategy="no",
            seed=self.seed,
            use_cpu=True,
            bf16=True,
            observer=RunObserver(pages=False),
        )
        seconds = process_time() - began
        predictor = Predictor.load(run, use_cpu=True)
        order = [list(predictor.facts.labels.names).index(name) for name in self.names]

        def logits(some: Rows) -> Array:
            found: Array = predictor.logits(*([row[c] for row in some] for c in self.texts))[:, order].astype(
                np.float64
            )
            return found

        return logits, seconds

    def result(self, model: str, logits: Array, seconds: float, **more: Any) -> dict[str, Any]:
        """Return the test scores of a model, and how many examples it gained and lost compared with the first one, `auto`."""
        gold = self.test_gold
        right = logits.argmax(axis=1) == gold
        self.auto = right if self.auto is None else self.auto
        return {
            "model": model,
            "accuracy": float(right.mean()),
            "gained": int((right & ~self.auto).sum()),
            "lost": int((self.auto & ~right).sum()),
            "log_loss": log_loss_of(logits, gold),
            "calibration_error": expected_calibration_error(softmax(logits), gold),
            "cpu_seconds": round(seconds, 1),
            "test_rows": len(gold),
            **more,
        }


def read_rows(file: str) -> Rows:
    """Return the rows of a TSV file without quoting."""
    with (SHARED / file).open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))


def measure(cell: Cell, students: Sequence[str], unlabeled: Sequence[int]) -> Any:
    """Yield the results of `auto`, the fold models and the students."""
    logits, auto_seconds = cell.train(cell.rows)
    auto, classes = logits(cell.test), len(cell.names)
    yield cell.result("auto", auto, auto_seconds)
    held, extra = np.empty((len(cell.rows), classes)), np.zeros((FOLDS, len(cell.extra), classes))
    test, seconds = np.zeros((FOLDS, len(cell.test), classes)), 0.0
    for k in range(FOLDS):
        logits, spent = cell.train([row for row, fold in zip(cell.rows, cell.fold, strict=True) if fold != k])
        began = process_time()
        held[cell.fold == k] = logits([row for row, fold in zip(cell.rows, cell.fold, strict=True) if fold == k])
        if cell.extra:
            extra[k] = logits(cell.extra)
        seconds += spent + process_time() - began
        test[k] = logits(cell.test)
    yield cell.result("folds", np.log(np.mean([softmax(one) for one in test], axis=0) + 1e-12), seconds)
    heat = fit_temperature(held, cell.gold, Task.MULTICLASS)
    value = 1.0 if heat is None else heat.value / (FOLDS / (FOLDS - 1)) ** 0.5
    yield cell.result("auto, temperature of best", auto / value, auto_seconds + seconds, temperature=value)
    for student in students:
        weight, temperature = map(float, student.split(":"))
        own = (1 - weight) * np.eye(classes)[cell.gold] + weight * softmax(held / temperature)
        far = np.mean([softmax(one / temperature) for one in extra], axis=0)
        for count in unlabeled:
            logits, spent = cell.train(cell.rows + cell.extra[:count], np.concatenate([own, far[:count]]))
            yield cell.result(f"student {student}", logits(cell.test), spent + seconds, unlabeled=count)


def print_table(results: list[dict[str, Any]]) -> None:
    """Print means over seeds: points gained over `auto`, calibration error, and time per time of `auto`."""
    names = list(dict.fromkeys((r["model"], r.get("unlabeled", 0)) for r in results))
    tasks = list(dict.fromkeys(r["task"] for r in results))
    print(
        f"| Model | Unlabeled | {' | '.join(tasks)} | Mean | Log loss | Calibration error | Time |\n{'|---' * (len(tasks) + 6)}|"
    )
    auto = {(r["task"], r["seed"]): r for r in results if r["model"] == "auto"}
    for name, count in names:
        here = [r for r in results if (r["model"], r.get("unlabeled", 0)) == (name, count)]
        gain = {
            t: [100 * (r["accuracy"] - auto[t, r["seed"]]["accuracy"]) for r in here if r["task"] == t] for t in tasks
        }
        score = {t: [100 * r["accuracy"] for r in here if r["task"] == t] for t in tasks}
        cells = [
            f"{statistics.fmean(score[t]):.1f} ({statistics.fmean(gain[t]):+.1f})" if gain[t] else "" for t in tasks
        ]
        mean = statistics.fmean(statistics.fmean(values) for values in gain.values() if values)
        loss, error = (statistics.fmean(r[n] for r in here) for n in ("log_loss", "calibration_error"))
        times = statistics.median(r["cpu_seconds"] / auto[r["task"], r["seed"]]["cpu_seconds"] for r in here)
        print(f"| {name} | {count:,} | {' | '.join(cells)} | {mean:+.2f} | {loss:.3f} | {error:.3f} | {times:.1f} |")


def main() -> None:
    """Train the models of each task and seed, and write the JSON after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=int, default=400, help="labeled examples")
    parser.add_argument("--unlabeled", type=int, nargs="+", default=[2000], help="texts without labels")
    parser.add_argument("--students", nargs="*", default=["0.5:1"], help="WEIGHT:TEMPERATURE of the teacher")
    parser.add_argument("--test_rows", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this file without training")
    args = parser.parse_args()
    if args.table:
        print_table(json.loads(args.table.read_text(encoding="utf-8"))["results"])
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    results: list[dict[str, Any]] = []
    for seed in args.seeds:
        for task in args.tasks:
            with tempfile.TemporaryDirectory() as folder:
                cell = Cell(args, task, seed, Path(folder))
                for found in measure(cell, args.students, args.unlabeled):
                    results.append({"task": task, "rows": args.size, "seed": seed, **found})
                    print(json.dumps(results[-1]), flush=True)
                    write_record(args.output, device="cpu", results=results)
    print_table(results)


if __name__ == "__main__":
    main()
