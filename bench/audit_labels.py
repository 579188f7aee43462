"""Planted label errors: area under the precision-recall curve of `tunesmith audit` beside cleanlab 2.9.

    python bench/audit_labels.py --tasks cr,subj,trec --rates 0.05,0.1 --rows 2000

Both see the same frozen features of one pass of the encoder. cleanlab gets out-of-fold probabilities of a logistic
regression on them (its documented recipe, 5 folds); ours are leave-one-out answers of ridge regression on the same features
and the TF-IDF of the same texts. Chosen on cr, subj and trec; reported on r8, news6 and
sick. Needs ../shared and `pip install cleanlab==2.9`.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tunesmith.audit.suspects import judge_labels, share_of_given, word_space
from tunesmith.config.load import load_config
from tunesmith.labels import LabelMap
from tunesmith.session.deep_labels import judge_by_folds, merge_judges
from tunesmith.session.watch import Watch

SHARED = Path("/work/shared")
MODEL = SHARED / "models" / "paraphrase-MiniLM-L3-v2"


def read_task(task: str, rows: int) -> tuple[list[tuple[str, ...]], np.ndarray[Any, Any], int]:
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


def embed(texts: list[str]) -> np.ndarray[Any, Any]:
    """Mean token vectors of the frozen encoder, kept in /tmp by content."""
    mark = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    kept = Path(f"/tmp/audit-labels-{mark}.npy")
    if kept.exists():
        return np.load(kept)  # type: ignore[no-any-return]
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL).eval()
    order = np.argsort([len(text) for text in texts])
    out = np.zeros((len(texts), model.config.hidden_size), np.float32)
    with torch.inference_mode():
        for at in range(0, len(texts), 32):
            some = order[at : at + 32]
            batch = tokenizer(
                [texts[i] for i in some], padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            out[some] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    np.save(kept, out)
    return out


def features_of(texts: list[tuple[str, ...]]) -> np.ndarray[Any, Any]:
    """One vector a row; for pairs the difference and the product of the two."""
    sides = [embed([row[side] for row in texts]) for side in range(len(texts[0]))]
    sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
    return sides[0] if len(sides) == 1 else np.concatenate([np.abs(sides[0] - sides[1]), sides[0] * sides[1]], axis=1)


def plant(ids: np.ndarray[Any, Any], classes: int, rate: float, seed: int) -> tuple[Any, Any]:
    """(labels with errors, which rows): uniform other labels."""
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(ids), bool)
    wrong[rng.choice(len(ids), round(rate * len(ids)), replace=False)] = True
    return np.where(wrong, (ids + rng.integers(1, classes, len(ids))) % classes, ids), wrong


def out_of_fold(features: Any, ids: Any) -> Any:
    """Probabilities for cleanlab: logistic regression, 5 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return cross_val_predict(model, features, ids, cv=folds, method="predict_proba")


def measure(task: str, rate: float, seed: int, rows: int, *, deep: bool) -> dict[str, Any]:
    """One line of the table."""
    from cleanlab.rank import get_label_quality_scores
    from sklearn.metrics import average_precision_score

    texts, clean, classes = read_task(task, rows)
    given, wrong = plant(clean, classes, rate, seed)
    labels = LabelMap.for_classes([str(i) for i in range(classes)])
    frozen = features_of(texts)
    found: dict[str, Any] = {"task": task, "rate": rate, "seed": seed}
    start = time.process_time()
    theirs = out_of_fold(frozen, given)
    for method in ("self_confidence", "normalized_margin"):
        found[f"cleanlab {method}"] = average_precision_score(
            wrong, 1 - get_label_quality_scores(given, theirs, method=method)
        )
    found["cleanlab s"] = time.process_time() - start
    start = time.process_time()
    words = word_space([" ".join(row) for row in texts])
    both = np.concatenate([frozen / frozen.std(), words / words.std() * 0.5], axis=1)
    for name, x in (("frozen only", frozen), ("words only", words), ("tunesmith", both)):
        found[name] = average_precision_score(wrong, 1 - share_of_given(judge_labels(x, given, labels), given))
    found["tunesmith s"] = time.process_time() - start
    if deep:
        start = time.process_time()
        judged = merge_judges(judge_labels(both, given, labels), _fold_answers(texts, given, labels), labels)
        found["deep"] = average_precision_score(wrong, 1 - share_of_given(judged, given))
        found["deep s"] = time.process_time() - start
    return found


def _fold_answers(texts: list[tuple[str, ...]], given: Any, labels: LabelMap) -> Any:
    """What `--labels deep` adds: k-fold fine-tuning of the same encoder."""
    bundle: Any = SimpleNamespace(labels=labels)
    config = load_config(None, {"model_name_or_path": str(MODEL), "max_seq_length": 128}, need_data=False)
    return judge_by_folds(config, bundle, texts, given, Watch())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="cr,subj,trec")
    parser.add_argument("--rates", default="0.05,0.1")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--deep", action="store_true", help="also --labels deep: minutes for each line")
    args = parser.parse_args()
    for task in args.tasks.split(","):
        for rate in map(float, args.rates.split(",")):
            lines = [measure(task, rate, seed, args.rows, deep=args.deep) for seed in range(args.seeds)]
            means = {k: float(np.mean([line[k] for line in lines])) for k in lines[0] if k not in ("task", "seed")}
            print(task, " ".join(f"{name} {value:.3f}" for name, value in means.items()), flush=True)


if __name__ == "__main__":
    main()
