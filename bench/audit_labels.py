"""Planted label errors: area under the precision-recall curve of `tunesmith audit --labels` beside cleanlab 2.9.

    python bench/audit_labels.py --judge judged.npz                     # probabilities of every judge, for each row
    python bench/audit_labels.py --table judged.npz                     # the table; needs `pip install cleanlab==2.9`
    python bench/audit_labels.py --pack scratch/labels_data             # rows and models for a machine without ../shared
    python bench/audit_labels.py --unpack scratch/labels_data /tmp/labels_shared     # there; then SHARED_DIR=/tmp/labels_shared

All judges see the same rows and the same frozen features of one pass of the encoder. cleanlab gets out-of-fold probabilities of
a logistic regression on them (its documented recipe, 5 folds), and also our own probabilities. Our ranking of these is its self
confidence: the probability of the given label.
`probe` is `--labels probe`: leave-one-out answers of ridge regression on the same features and the TF-IDF of the same texts.
`deep` is `--labels deep`: the probe together with k-fold fine-tuning. Errors are even (any other label) or lean (each label is
taken for one other, and some labels more often). Rules were chosen with paraphrase-MiniLM-L3-v2 on CHOSEN_ON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from diagnose_pack import _pack_weights, _save, _unpack_weights
from tunesmith.labels import LabelMap

SHARED = Path(os.environ.get("SHARED_DIR", "/work/shared"))
OUTSIDE = Path(os.environ.get("OUTSIDE_DIR", "scratch/outside"))
"""Where bench/outside_tasks.py and bench/audit_sources.py have written theirs."""
MODELS = {
    "L3": "paraphrase-MiniLM-L3-v2",
    "L6": "all-MiniLM-L6-v2",
    "granite": "granite-embedding-30m-english",
}
CHOSEN_ON = ("cr", "subj", "trec", "sections", "vtweet", "vnyt")
TASKS = (*CHOSEN_ON, "r8", "sick", "news6", "glosses", "fortunes", "vamazon", "vmovie")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
METHODS = ("self_confidence", "normalized_margin")

MOST_WORDS = 90

Table = np.ndarray[Any, Any]


def read_task(task: str, rows: int) -> tuple[list[tuple[str, ...]], Table, int]:
    """(texts, label ids, number of labels) of some training rows of a task."""
    file = next(f for root in (SHARED, OUTSIDE) for f in sorted((root / "data" / task).glob("train*.tsv")))
    lines = file.read_text(encoding="utf-8").splitlines()
    head = lines[0].split("\t")
    cells = [dict(zip(head, line.split("\t"), strict=True)) for line in lines[1:]]
    text = [name for name in head if name not in ("label", "idx")]
    cells = [row for row in cells if all(row[name].strip() for name in text)]
    keep = np.sort(np.random.default_rng(0).permutation(len(cells))[:rows])
    names = sorted({row["label"] for row in cells})
    ids = np.array([names.index(cells[i]["label"]) for i in keep])
    return [tuple(" ".join(cells[i][name].split()[:MOST_WORDS]) for name in text) for i in keep], ids, len(names)


def plant(ids: Table, classes: int, kind: str, rate: float, seed: int) -> tuple[Table, Table]:
    """(labels with errors, which rows)."""
    rng = np.random.default_rng(seed)
    to = (ids + rng.integers(1, classes, len(ids))) % classes
    often = np.ones(len(ids))
    if kind == "lean":
        to = ((np.arange(classes) + rng.integers(1, classes, classes)) % classes)[ids]
        often = (rng.dirichlet(np.ones(classes)) / np.bincount(ids, minlength=classes))[ids]
    wrong = np.zeros(len(ids), bool)
    wrong[rng.choice(len(ids), round(rate * len(ids)), replace=False, p=often / often.sum())] = True
    return np.where(wrong, to, ids), wrong


def out_of_fold(features: Table, ids: Table, classes: int) -> Table:
    """Probabilities for cleanlab: logistic regression, 5 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    found = np.zeros((len(ids), classes))
    found[:, np.unique(ids)] = cross_val_predict(model, features, ids, cv=folds, method="predict_proba")
    return found


def model_folder(name: str) -> Path:
    """Where a model's files are; the embedded one is found in its package unless it was carried along."""
    folder = SHARED / "models" / MODELS[name]
    if folder.is_dir():
        return folder
    from tunesmith.models.files import find_embedded

    found = find_embedded()
    assert found is not None
    return Path(found)


def judge(unit: dict[str, Any]) -> dict[str, Any]:
    """What each judge says about the labels of one task with planted errors; and the processor seconds of each."""
    from tunesmith.config.load import load_config
    from tunesmith.data.label_errors import judge_labels, word_space
    from tunesmith.models.files import load_tokenizer
    from tunesmith.pipeline.audit import embed_rows, join_features, judge_by_folds
    from tunesmith.pipeline.watch import Watch

    texts, clean, classes = read_task(unit["task"], unit["rows"])
    labels = LabelMap.for_classes([str(i) for i in range(classes)])
    folder = model_folder(unit["model"])
    frozen = embed_rows(folder, load_tokenizer(folder), labels, texts, Watch())
    features = join_features(frozen, word_space([" ".join(row) for row in texts]))
    config = load_config(None, {"model_name_or_path": str(folder), "max_seq_length": unit["length"]}, need_data=False)
    found: dict[str, Any] = {}
    for kind, rate, seed in unit["errors"]:
        given, wrong = plant(clean, classes, kind, rate, seed)
        start = time.process_time()
        judged = {"logistic": out_of_fold(frozen, given, classes)}
        between = time.process_time()
        judged["probe"] = judge_labels(features, given, labels)
        spent = {"logistic_s": between - start, "probe_s": time.process_time() - between}
        if unit["deep"]:
            bundle: Any = SimpleNamespace(labels=labels)
            start, clock = time.process_time(), time.monotonic()
            judged["folds"] = judge_by_folds(config, bundle, texts, given, Watch())
            spent |= {"deep_s": time.process_time() - start, "deep_clock_s": time.monotonic() - clock}
        name = f"{unit['model']}/{unit['task']}/{kind}/{rate}/{seed}"
        found |= {f"{name}/{key}": v for key, v in {"given": given, "wrong": wrong, **judged, **spent}.items()}
    return found


def judge_all(args: argparse.Namespace) -> None:
    """Every unit, by several processes; the file is written after each."""
    errors = list(itertools.product(args.kinds, args.rates, range(args.seeds)))
    parts = [[one] for one in errors] if args.deep else [errors]  # fine-tuning is what takes the time
    shared = {"rows": args.rows, "length": args.length, "deep": args.deep}
    units = [
        {"task": task, "model": model, "errors": part, **shared}
        for part, model, task in itertools.product(parts, args.models, args.tasks)
    ]
    begun, found = time.monotonic(), dict[str, Any]()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for one in pool.imap_unordered(judge, units):
            found |= one
            part = args.judge.with_suffix(".part.npz")
            np.savez_compressed(part, **found)
            part.replace(args.judge)  # whole, even when the time is over in the middle
            print(f"{time.monotonic() - begun:6.1f} s  {next(iter(one))}", flush=True)


def table(paths: list[Path]) -> None:
    """One line for each model, task, kind and rate: the areas of all judges by cleanlab's rankings, means over the seeds."""
    from cleanlab.rank import get_label_quality_scores
    from sklearn.metrics import average_precision_score

    from tunesmith.pipeline.audit import merge_judges

    data = {key: value for path in paths for key, value in np.load(path).items()}
    lines: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for name in sorted({key.rsplit("/", 1)[0] for key in data}):
        given, wrong = data[f"{name}/given"], data[f"{name}/wrong"]
        judges = {who: data[f"{name}/{who}"] for who in ("logistic", "probe", "folds") if f"{name}/{who}" in data}
        if "folds" in judges:
            labels = LabelMap.for_classes([str(i) for i in range(judges["probe"].shape[1])])
            judges["deep"] = merge_judges(judges["probe"], judges["folds"], given, labels)
        line: dict[str, float] = {}
        for who, judged in judges.items():
            p = judged / judged.sum(axis=1, keepdims=True)
            for method in METHODS:
                quality = get_label_quality_scores(given, p, method=method)
                line[f"{method} on {who}"] = float(average_precision_score(wrong, -quality))
        line |= {
            key: float(data[f"{name}/{key}"]) for key in ("logistic_s", "probe_s", "deep_s") if f"{name}/{key}" in data
        }
        lines.setdefault(tuple(name.split("/")[:-1]), []).append(line)
    columns = list(next(iter(lines.values()))[0])
    print("\t".join(["model", "task", "errors", "share", *columns]))
    for place, some in lines.items():
        means = [f"{np.mean([line[column] for line in some]):.3f}" for column in columns]
        print("\t".join([*place, *means]))
    for kind, (what, held) in itertools.product(("even", "lean"), (("chosen on", False), ("others", True))):
        found = [some for place, some in lines.items() if place[2] == kind and (place[1] not in CHOSEN_ON) == held]
        if found:
            means = [f"{np.mean([np.mean([x[column] for x in some]) for some in found]):.3f}" for column in columns]
            print("\t".join(["", what, kind, "mean", *means]))


def pack(target: Path, rows: int, models: list[str]) -> None:
    """Writes the files of data and tokenizers as one, and the weights of some models, cut to the tokens of these rows."""
    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for task in TASKS:
        root = next(root for root in (SHARED, OUTSIDE) if (root / "data" / task).is_dir())
        for path in sorted((root / "data" / task).glob("*.tsv")):
            files[f"data/{task}/{path.name}"] = path.read_text(encoding="utf-8")
    texts = [text for task in TASKS for row in read_task(task, rows)[0] for text in row]
    for short, name in MODELS.items():
        folder = model_folder(short)
        files |= {f"models/{name}/{file}": (folder / file).read_text(encoding="utf-8") for file in FILES}
        if short in models:
            _pack_weights(folder, texts, target / f"{name}.xz")
    (target / "files.json.xz").write_bytes(lzma.compress(json.dumps(files).encode()))
    print(f"{sum(path.stat().st_size for path in target.iterdir()) / 2**20:.1f} MiB in {target}")


def unpack(source: Path, shared: Path) -> None:
    """Makes `data` and `models` of what `pack` wrote."""
    shutil.rmtree(shared, ignore_errors=True)
    for name, text in json.loads(lzma.decompress((source / "files.json.xz").read_bytes())).items():
        path = shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for path in sorted(source.glob("*.xz")):
        if path.stem in MODELS.values():
            _save(_unpack_weights(path), shared / "models" / path.stem)


def main() -> None:
    """Judges, or prints the table, or packs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, metavar="FILE", help="write what every judge says")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the areas")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, nargs=2, metavar=("FOLDER", "SHARED"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kinds", nargs="+", default=["even", "lean"], choices=["even", "lean"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1])
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--deep", action="store_true", help="also --labels deep")
    args = parser.parse_args()
    if args.unpack:
        unpack(*args.unpack)
    if args.pack:
        pack(args.pack, args.rows, args.models)
    if args.judge:
        judge_all(args)
    if args.table:
        table(args.table)


if __name__ == "__main__":
    main()
