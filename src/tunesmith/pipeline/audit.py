"""`tunesmith audit`: rows, tokens and labels of a config's data; suspicious labels as a review file.

Labels are judged by words, by the vectors of the frozen encoder, or by k-fold fine-tuning: each row by a model that was trained
on the other folds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith.config.options import RunConfig
from tunesmith.data.audit import sort_findings
from tunesmith.data.cache import read_prediction_columns
from tunesmith.data.label_errors import describe_suspects, format_review, judge_labels, rank_suspects, word_space
from tunesmith.data.near_duplicates import sample_rows
from tunesmith.data.read import DataBundle
from tunesmith.data.source import Ints
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.models.files import position_limit, read_config_file
from tunesmith.pipeline.inputs import RunData, audit_texts, load_run_tokenizer, read_run_data
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import Watch
from tunesmith.runs.writing import write_new

LabelJudge = Literal["words", "probe", "deep", "off"]
MOST_JUDGED = {"words": 20_000, "probe": 10_000, "deep": 20_000}
"""Rows whose labels are judged; of more an even sample."""
FEWEST_JUDGED = 50
MOST_TOKENS, BATCH_ROWS = 128, 32
"""Of a text that the frozen encoder reads."""
FOLDS = 4
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Powers of a judge's probabilities that are tried when two judges are merged."""
METHODS = {"words": "TF-IDF", "probe": "frozen features and TF-IDF", "deep": "k-fold fine-tuning"}


@dataclass(frozen=True)
class AuditResult:
    """What an audit found, most serious first; `review_file` is None if none was requested or no label is suspicious."""

    findings: list[Finding]
    rows: dict[str, int]
    review_file: str | None


def audit_files(config: RunConfig, *, labels: LabelJudge, review_file: str | None, watch: Watch) -> AuditResult:
    """Reads and audits; judges the labels of train as `labels` says. Writes nothing but `review_file`."""
    data = read_run_data(config, {}, watch.progress, need_weights=labels in ("probe", "deep"))
    bundle = data.bundle
    tokenizer = load_run_tokenizer(config, data.folder)
    limit = position_limit(read_config_file(data.folder))
    findings = [*bundle.findings, *audit_texts(bundle, tokenizer, asked=config.max_seq_length, limit=limit)]
    wrote = None
    if labels != "off":
        suspicious, wrote = _judge(config, data, tokenizer, labels, review_file, watch)
        findings += suspicious
    return AuditResult(sort_findings(findings), {s: len(p) for s, p in bundle.parts.items()}, wrote)


def _judge(
    config: RunConfig, data: RunData, tokenizer: Any, method: LabelJudge, review_file: str | None, watch: Watch
) -> tuple[list[Finding], str | None]:
    bundle = data.bundle
    rows, texts, ids = _labelled_rows(bundle, MOST_JUDGED[method])
    if bundle.labels.task is Task.MULTILABEL or len(rows) < FEWEST_JUDGED or len(np.unique(ids)) < 2:
        return [], None
    features = word_space([" ".join(row) for row in texts])
    if method in ("probe", "deep"):
        frozen = embed_rows(data.folder, tokenizer, bundle.labels, texts, watch)
        features = join_features(frozen, features)
    judged = judge_labels(features, ids, bundle.labels)
    if method == "deep":
        judged = merge_judges(judged, judge_by_folds(config, bundle, texts, ids, watch), ids, bundle.labels)
    suspects = rank_suspects(judged, ids, bundle.labels)
    where = review_file if suspects else None
    part = bundle.parts["train"]
    numbers = rows if part.rows is None else part.rows[rows]
    if where is not None:
        names = list(bundle.columns.text)
        write_new(Path(where), format_review(suspects, numbers, texts, ids, bundle.labels, names))
    method_name = METHODS[method]
    return describe_suspects(suspects, part, numbers, ids, bundle.labels, method=method_name, review=where), where


def join_features(frozen: Ints, words: Ints) -> Ints:
    """Both side by side; words weigh half."""
    sides = (frozen / max(float(frozen.std()), 1e-12), 0.5 * words / max(float(words.std()), 1e-12))
    return np.concatenate(sides, axis=1)


def _labelled_rows(bundle: DataBundle, most: int) -> tuple[Ints, list[Sequence[str]], Ints]:
    """(row numbers within train, their texts, their labels) of the rows that have one."""
    part, names = bundle.parts["train"], list(bundle.columns.text)
    if bundle.labels.task is Task.MULTILABEL:
        return np.empty(0, np.int64), [], np.empty(0)
    sample = sample_rows(part, names, most)
    ids = part.labels().to_numpy(zero_copy_only=False)[sample.rows]
    known = np.isfinite(ids) if bundle.labels.task is Task.REGRESSION else ids >= 0
    texts = list(zip(*(sample.columns[name] for name in names), strict=True))
    return sample.rows[known], [row for row, good in zip(texts, known, strict=True) if good], ids[known]


def embed_rows(folder: Path, tokenizer: Any, labels: LabelMap, texts: Sequence[Sequence[str]], watch: Watch) -> Ints:
    """One vector of the frozen encoder a row: the mean of the first tokens of a text; two texts by their difference and product.
    Each text is computed once."""
    import torch

    from tunesmith.models.load import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, labels, ignore_mismatched_sizes=True, new_head=True).model
    bare = model.base_model.to(device).eval()
    known = {text: number for number, text in enumerate(dict.fromkeys(t for row in texts for t in row))}
    every = list(known)
    order = np.argsort([len(text) for text in every], kind="stable")
    vectors: Ints | None = None
    with torch.inference_mode():
        for at in range(0, len(every), BATCH_ROWS):
            some = order[at : at + BATCH_ROWS]
            batch = tokenizer(
                [every[i] for i in some], padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            ).to(device)
            hidden = bare(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None]
            mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1))
            vectors = np.zeros((len(every), mean.shape[1]), np.float32) if vectors is None else vectors
            vectors[some] = mean.cpu().numpy()
            watch.progress("reading with the frozen model", min(at + BATCH_ROWS, len(every)), len(every))
    assert vectors is not None
    sides = [vectors[[known[row[side]] for row in texts]] for side in range(len(texts[0]))]
    return sides[0] if len(sides) == 1 else np.concatenate([np.abs(sides[0] - sides[1]), sides[0] * sides[1]], axis=1)


def judge_by_folds(
    config: RunConfig, bundle: DataBundle, texts: Sequence[Sequence[str]], ids: Ints, watch: Watch
) -> Ints:
    """Probabilities (rows, labels), or the predicted numbers, of the weights after the last step of each fold."""
    labels = bundle.labels
    regression = labels.task is Task.REGRESSION
    names = [f"text{at}" for at in range(len(texts[0]))]
    rows = [
        {**dict(zip(names, row, strict=True)), "label": float(i) if regression else labels.names[int(i)]}
        for row, i in zip(texts, ids, strict=True)
    ]
    fold = np.random.default_rng(config.seed).permutation(len(rows)) % FOLDS
    judged = np.zeros((len(rows), len(labels)))
    for number in range(FOLDS):
        watch.say(f"Labels: fold {number + 1} of {FOLDS} is judged by a model trained on the others.")
        with tempfile.TemporaryDirectory(prefix="tunesmith-folds-") as folder:
            here = np.flatnonzero(fold == number)
            own = _fold_config(config, labels, names, folder)
            data: dict[str, Any] = {
                "train_data": [rows[i] for i in np.flatnonzero(fold != number)],
                "validation_data": [rows[i] for i in here],
            }
            result = finetune(own, watch=Watch(progress=watch.progress, pages=False), **data)
            columns = read_prediction_columns(result.run.predictions_file)
            wanted = ["prediction"] if regression else [f"prob_{name}" for name in labels.names]
            judged[here] = np.stack([np.asarray(columns[name], dtype=np.float64) for name in wanted], axis=1)
    return judged


def _fold_config(config: RunConfig, labels: LabelMap, names: Sequence[str], folder: str) -> RunConfig:
    """The same run on rows in memory, in a temporary folder; the last weights are used, not the best."""
    regression = labels.task is Task.REGRESSION
    return replace(
        config,
        train_file=None,
        validation_file=None,
        test_file=None,
        task_name=None,
        dataset_name=None,
        dataset_config_name=None,
        labels_file=None,
        strict_data=False,
        text_column_names=tuple(names),
        label_column_name="label",
        label_names=None if regression else labels.names,
        do_regression=regression,
        output_dir=str(Path(folder) / "run"),
        cache_dir=folder,
        eval_strategy="no",
        load_best_model_at_end=False,
        save_strategy="no",
        train_sample_size=0,
    )


def merge_judges(one: Ints, two: Ints, ids: Ints, labels: LabelMap) -> Ints:
    """A weighted geometric mean of two judges' probabilities (a weighted mean of their numbers).

    The weights are those under which the given labels are likeliest: neither judge has seen the label of the row it judges.
    """
    best, found = np.inf, one
    if labels.task is Task.REGRESSION:
        for share in np.linspace(0, 1, 9):
            merged = share * one + (1 - share) * two
            loss = float(np.abs(merged[:, 0] - ids).sum())
            best, found = (loss, merged) if loss < best else (best, found)
        return found
    sides, rows = [np.log(np.maximum(judged, 1e-6)) for judged in (one, two)], np.arange(len(ids))
    for first, second in product(WEIGHTS, repeat=2):
        logits = first * sides[0] + second * sides[1]
        merged = np.exp(logits - logits.max(axis=1, keepdims=True))
        merged /= merged.sum(axis=1, keepdims=True)
        loss = -float(np.log(np.maximum(merged[rows, ids], 1e-6)).sum())
        best, found = (loss, merged) if loss < best else (best, found)
    return found
