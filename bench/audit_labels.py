"""Planted label errors: area under the precision-recall curve of `tunesmith audit --labels` beside cleanlab 2.9.

    python bench/audit_labels.py --judge judged.npz --deep --jobs 2     # probabilities of every judge, for each row
    python bench/audit_labels.py --table judged.npz                     # the table; needs `pip install cleanlab==2.9`
    python bench/audit_labels.py --pack scratch/labels_data             # rows and models for a machine without ../shared
    python bench/audit_labels.py --unpack scratch/labels_data /tmp/labels_shared     # there; then SHARED_DIR=/tmp/labels_shared

All judges see the same rows and the same frozen features of one pass of the encoder. cleanlab gets out-of-fold probabilities of
a logistic regression on them (its documented recipe, 5 folds), and also our own probabilities. `probe` is `--labels probe`:
leave-one-out answers of ridge regression on the same features and the TF-IDF of the same texts. `deep` is `--labels deep`: the
probe together with k-fold fine-tuning. Rules were chosen on cr, subj and trec with paraphrase-MiniLM-L3-v2.
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
MODELS = {
    "L3": "paraphrase-MiniLM-L3-v2",
    "L6": "all-MiniLM-L6-v2",
    "granite": "granite-embedding-30m-english",
}
TASKS = ("cr", "subj", "trec", "r8", "sick", "news6")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PACKED_DATA = ("cr", "subj", "trec", "r8", "sick", "news6")
METHODS = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")

Table = np.ndarray[Any, Any]


def read_task(task: str, rows: int) -> tuple[list[tuple[str, ...]], Table, int]:
    """(texts, label ids, number of labels) of some training rows of a task."""
    file = SHARED / "data" / task / "train.tsv"
    file = file if file.exists() else SHARED / "data" / task / "train_entailment.tsv"
    lines = file.read_text(encoding="utf-8").splitlines()
    head = lines[0].split("\t")
    cells = [dict(zip(head, line.split("\t"), strict=True)) for line in lines[1:]]
    text = [name for name in head if name not in ("label", "idx")]
    cells = [row for row in cells if all(row[name].strip() for name in text)]
    keep = np.sort(np.random.default_rng(0).permutation(len(cells))[:rows])
    names = sorted({row["label"] for row in cells})
    ids = np.array([names.index(cells[i]["label"]) for i in keep])
    return [tuple(cells[i][name] for name in text) for i in keep], ids, len(names)


def plant(ids: Table, classes: int, rate: float, seed: int) -> tuple[Table, Table]:
    """(labels with errors, which rows): uniform other labels."""
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(ids), bool)
    wrong[rng.choice(len(ids), round(rate * len(ids)), replace=False)] = True
    return np.where(wrong, (ids + rng.integers(1, classes, len(ids))) % classes, ids), wrong


def out_of_fold(features: Table, ids: Table) -> Table:
    """Probabilities for cleanlab: logistic regression, 5 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    found: Table = cross_val_predict(model, features, ids, cv=folds, method="predict_proba")
    return found


def model_folder(name: str) -> Path:
    """Where a model's files are; the embedded one is found in its package unless it was carried along."""
    folder = SHARED / "models" / MODELS[name]
    if folder.is_dir():
        return folder
    from tunesmith.encoder.resolve import find_embedded

    found = find_embedded()
    assert found is not None
    return Path(found)


def judge(unit: dict[str, Any]) -> dict[str, Any]:
    """What each judge says about the labels of one task with planted errors; and the processor seconds of each."""
    from tunesmith.audit.suspects import judge_labels, word_space
    from tunesmith.config.load import load_config
    from tunesmith.encoder.resolve import load_tokenizer
    from tunesmith.session.auditing import join_features
    from tunesmith.session.deep_labels import judge_by_folds
    from tunesmith.session.frozen_text import embed_rows
    from tunesmith.session.watch import Watch

    texts, clean, classes = read_task(unit["task"], unit["rows"])
    given, wrong = plant(clean, classes, unit["rate"], unit["seed"])
    labels = LabelMap.for_classes([str(i) for i in range(classes)])
    folder = model_folder(unit["model"])
    frozen = embed_rows(folder, load_tokenizer(folder), labels, texts, Watch())
    found: dict[str, Any] = {**unit, "given": given, "wrong": wrong}
    start = time.process_time()
    found["logistic"] = out_of_fold(frozen, given)
    found["logistic_s"] = time.process_time() - start
    start = time.process_time()
    found["probe"] = judge_labels(join_features(frozen, word_space([" ".join(row) for row in texts])), given, labels)
    found["probe_s"] = time.process_time() - start
    if unit["deep"]:
        bundle: Any = SimpleNamespace(labels=labels)
        options = {"model_name_or_path": str(folder), "max_seq_length": unit["length"]}
        config = load_config(None, options, need_data=False)
        start, clock = time.process_time(), time.monotonic()
        found["folds"] = judge_by_folds(config, bundle, texts, given, Watch())
        found["deep_s"], found["deep_clock_s"] = time.process_time() - start, time.monotonic() - clock
    return found


def judge_all(args: argparse.Namespace) -> None:
    """Every unit, by several processes; the file is written after each."""
    units = [
        {"task": t, "model": m, "rate": r, "seed": s, "rows": args.rows, "length": args.length, "deep": args.deep}
        for s, m, t, r in itertools.product(range(args.seeds), args.models, args.tasks, args.rates)
    ]
    begun, found = time.monotonic(), {}
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=None) as pool:
        for one in pool.imap_unordered(judge, units):
            name = f"{one['model']}/{one['task']}/{one['rate']}/{one['seed']}"
            found |= {f"{name}/{key}": value for key, value in one.items() if isinstance(value, float | np.ndarray)}
            part = args.judge.with_suffix(".part.npz")
            np.savez_compressed(part, **found)
            part.replace(args.judge)  # whole, even when the time is over in the middle
            print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)


def table(paths: list[Path]) -> None:
    """One line for each model, task and rate: the areas of all judges."""
    from cleanlab.rank import get_label_quality_scores
    from sklearn.metrics import average_precision_score

    from tunesmith.audit.suspects import share_of_given
    from tunesmith.session.deep_labels import merge_judges

    data = {key: value for path in paths for key, value in np.load(path).items()}
    lines: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for name in sorted({key.rsplit("/", 1)[0] for key in data}):
        model, task, rate, _ = name.split("/")
        given, wrong = data[f"{name}/given"], data[f"{name}/wrong"]
        judges = {who: data[f"{name}/{who}"] for who in ("logistic", "probe", "folds") if f"{name}/{who}" in data}
        labels = LabelMap.for_classes([str(i) for i in range(judges["probe"].shape[1])])
        if "folds" in judges:
            judges["deep"] = merge_judges(judges["probe"], judges["folds"], given, labels)
        line: dict[str, float] = {}
        for who, judged in judges.items():
            p = judged / judged.sum(axis=1, keepdims=True)
            for method in METHODS[: 3 if who == "logistic" else 1]:
                quality = get_label_quality_scores(given, p, method=method)
                line[f"cleanlab {method} on {who}"] = float(average_precision_score(wrong, 1 - quality))
            if who not in ("logistic", "folds"):
                line[f"tunesmith {who}"] = float(average_precision_score(wrong, 1 - share_of_given(judged, given)))
        lines.setdefault((model, task, rate), []).append(line)
    columns = list(next(iter(lines.values()))[0])
    print("\t".join(["model", "task", "errors", *columns]))
    for place, some in lines.items():
        means = [f"{np.mean([line[column] for line in some]):.3f}" for column in columns]
        print("\t".join([*place, *means]))


def pack(target: Path, rows: int, models: list[str]) -> None:
    """Writes the files of data and tokenizers as one, and the weights of some models, cut to the tokens of these rows."""
    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for task in PACKED_DATA:
        for path in sorted((SHARED / "data" / task).glob("*.tsv")):
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
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1])
    parser.add_argument("--rows", type=int, default=1_200)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1)
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
