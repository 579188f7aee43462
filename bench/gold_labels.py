"""Measure --gold_file: 20% wrong training labels with a known confusion, 200 gold examples, 1,000 training examples.

    python bench/gold_labels.py --tasks cr sick_entailment mrpc --seeds 3            # development tasks
    python bench/gold_labels.py --tasks trec news6 subj --seeds 3                    # held-out tasks
    python bench/gold_labels.py --tasks trec news6 --train                           # with fine-tuning

Each label is replaced by the next class with a probability of 20%. Without --train, a linear probe on the frozen encoder is
trained on right, wrong and corrected labels (seconds per task). With --train, three runs per task have the same validation
examples (the gold examples) and the same test examples: right labels, wrong labels, and wrong labels with --gold_file (a
minute of one core per run).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from label_noise import embed
from tunesmith.labels import LabelMap, Task
from tunesmith.pipeline import gold, probe
from tunesmith.pipeline.train import RunObserver, finetune

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "research" / "measurements" / "gold_labels.json"
TRAIN, GOLD, TEST, WRONG = 1000, 200, 4000, 0.2


class Split:
    """The labels of a split, where a run has its tokens as well."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)


def read_task(task: str, seed: int) -> tuple[list[str], list[dict[str, str]]]:
    """Return the text columns, and the rows of all splits of a task in random order, without repeated texts."""
    folder, _, kind = task.partition("_")
    found: list[dict[str, str]] = []
    for file in sorted((SHARED / "data" / folder).glob(f"*_{kind}.tsv" if kind else "*.tsv")):
        with file.open(encoding="utf-8", newline="") as lines:
            found += csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    columns = [name for name in found[0] if name not in ("idx", "id", "label")]
    kept = {tuple(" ".join(row[n].lower().split()) for n in columns): row for row in found}
    rows = [row for key, row in kept.items() if all(key)]
    return columns, [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


def write(path: Path, rows: list[dict[str, str]], columns: list[str]) -> str:
    """Write a csv file; return its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def measure(task: str, seed: int, model: str, folder: Path) -> dict[str, Any]:
    """Return test accuracies of the three runs, and how many training labels are right before and after the correction."""
    columns, rows = read_task(task, seed)
    rows = rows[: TRAIN + GOLD + TEST]
    names = sorted({row["label"] for row in rows})
    rng = np.random.default_rng(seed)
    for row in rows:
        other = names[(names.index(row["label"]) + 1) % len(names)]
        row["llm_label"] = other if rng.random() < WRONG else row["label"]
    train, human, test = rows[:TRAIN], rows[TRAIN : TRAIN + GOLD], rows[TRAIN + GOLD :]
    clean = write(folder / "clean.csv", train, [*columns, "label"])
    noisy = write(folder / "noisy.csv", [{**row, "label": row["llm_label"]} for row in train], [*columns, "label"])
    gold_file = write(folder / "gold.csv", human, [*columns, "label", "llm_label"])
    options: dict[str, Any] = {
        "test_file": write(folder / "test.csv", test, [*columns, "label"]),
        "text_column_names": tuple(columns),
        "label_column_name": "label",
        "label_names": tuple(names),
        "model_name_or_path": model,
        "max_seq_length": 64,
        "train_sample_size": 0,
        "seed": seed,
    }
    known: list[Any] = []
    find = gold.find_targets

    def remember(*given: Any) -> Any:
        known.append(find(*given))
        return known[-1]

    gold.find_targets = remember
    found: dict[str, Any] = {"task": task, "seed": seed, "test": len(test), "classes": len(names)}
    truth = np.array([names.index(row["label"]) for row in train])
    machine = np.array([names.index(row["llm_label"]) for row in train])
    try:
        for kind, own in (
            ("corrected", {"train_file": noisy, "gold_file": gold_file}),
            ("wrong", {"train_file": noisy, "validation_file": gold_file}),
            ("right", {"train_file": clean, "validation_file": gold_file}),
        ):
            result = finetune(observer=RunObserver(pages=False), output_dir=str(folder / kind), **options, **own)
            found[kind] = result.scores["test"]["accuracy"].value

    finally:
        gold.find_targets = find
    targets, _, facts = known[0]
    names_seen = json.loads((folder / "corrected" / "data_summary.json").read_text())["labels"]
    order = np.array([names.index(name) for name in names_seen])
    found["corrects"] = targets is not None
    found["machine_right"] = float((machine == truth).mean())
    found["corrected_right"] = None if targets is None else float((order[targets.argmax(axis=1)] == truth).mean())
    found["agreement"] = {name: facts["agreement"][name] for name in ("right", "low", "high")}
    return found


def measure_labels(features: Any, truth: Any, seed: int, *, llm: bool) -> dict[str, Any]:
    """Return how often labels are right before and after the correction, and test accuracies of linear probes."""
    rng, classes = np.random.default_rng(seed), int(truth.max()) + 1
    order = rng.permutation(len(truth))
    train, human, test = order[:TRAIN], order[TRAIN : TRAIN + GOLD], order[TRAIN + GOLD :]
    machine = np.where(rng.random(len(truth)) < WRONG, (truth + 1) % classes, truth)
    own = gold.count_agreement(machine[human], truth[human], tuple(map(str, range(classes)))) if llm else None
    ids = machine[human] if llm else np.full(GOLD, gold.UNKNOWN)
    splits = {"train": Split(machine[train]), "validation": Split(truth[human])}
    rows = {id(splits["train"]): features[train], id(splits["validation"]): features[human]}
    labels = LabelMap.for_classes(tuple(map(str, range(classes))))
    run: Any = SimpleNamespace(bundle=SimpleNamespace(labels=labels), splits=splits, observer=RunObserver())
    probe.frozen_features = lambda run, rows_of, progress=None: SimpleNamespace(mean=rows[id(rows_of)])  # type: ignore[assignment]
    targets, _, facts = gold.find_targets(run, gold.Gold({"validation": ids}, own))

    def score(targets: Any) -> float:
        fit = probe.fit_linear(features[train], torch.from_numpy(targets), Task.MULTILABEL, classes)
        return float((fit.logits(features[test]).argmax(dim=1).numpy() == truth[test]).mean())

    wrong = np.eye(classes)[machine[train]]
    used = wrong if targets is None else targets
    return {
        "seed": seed,
        "llm_label": llm,
        "corrects": targets is not None,
        "machine_right": float((machine[train] == truth[train]).mean()),
        "corrected_right": float((used.argmax(axis=1) == truth[train]).mean()),
        "estimated_right": [facts["agreement"][name] for name in ("right", "low", "high")],
        "probe": [score(np.eye(classes)[truth[train]]), score(wrong), score(used)],
    }


def embed_task(task: str, model: str) -> tuple[torch.Tensor, Any]:
    """Return the mean vectors and label ids of a task's examples."""
    columns, rows = read_task(task, 0)
    rows = rows[: TRAIN + GOLD + TEST]
    names = sorted({row["label"] for row in rows})
    texts = [tuple(row[name] for name in columns) for row in rows]
    return embed(model, texts), np.array([names.index(row["label"]) for row in rows])


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--model", default=str(SHARED / "models" / "paraphrase-MiniLM-L3-v2"))
    args = parser.parse_args()
    kind = "train" if args.train else "labels"
    results = json.loads(args.output.read_text()) if args.output.exists() else []
    for task in args.tasks:
        if args.train:
            found = []
            for seed in range(args.seeds):
                with tempfile.TemporaryDirectory() as temporary:
                    found.append(measure(task, seed, args.model, Path(temporary)))
        else:
            features, truth = embed_task(task, args.model)
            found = [measure_labels(features, truth, s, llm=llm) for llm in (True, False) for s in range(args.seeds)]
        found = [{"kind": kind, **one, "task": task} for one in found]
        results = [one for one in results if (one["kind"], one["task"]) != (kind, task)] + found
        args.output.write_text("[\n" + ",\n".join(json.dumps(one) for one in results) + "\n]\n")
        for one in found:
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
