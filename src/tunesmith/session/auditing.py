"""`tunesmith audit`: rows, tokens and labels of a config's data, without training; suspicious labels as a review file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith.audit.row_audit import sort_findings
from tunesmith.audit.suspects import describe_suspects, format_review, judge_labels, rank_suspects, word_space
from tunesmith.audit.text_survey import Ints, sample_rows
from tunesmith.config.schema import RunConfig
from tunesmith.encoder.config_file import read_config_file
from tunesmith.encoder.resolve import load_tokenizer, position_limit
from tunesmith.findings import Finding
from tunesmith.labels import Task
from tunesmith.reading.load import DataBundle
from tunesmith.run.writing import write_new
from tunesmith.session.inputs import RunData, read_run_data
from tunesmith.session.run_tokens import audit_texts
from tunesmith.session.watch import Watch

LabelJudge = Literal["words", "probe", "deep", "off"]
MOST_JUDGED = {"words": 20_000, "probe": 10_000, "deep": 20_000}
"""Rows whose labels are judged; of more an even sample."""
FEWEST_JUDGED = 50
METHODS = {"words": "TF-IDF", "probe": "frozen features and TF-IDF", "deep": "k-fold fine-tuning"}


@dataclass(frozen=True)
class AuditResult:
    """What an audit found, most serious first; `review_file` is None when none was asked for or no label is suspicious."""

    findings: list[Finding]
    rows: dict[str, int]
    review_file: str | None


def audit_files(config: RunConfig, *, labels: LabelJudge, review_file: str | None, watch: Watch) -> AuditResult:
    """Reads and audits; judges the labels of train as `labels` says. Writes nothing but `review_file`."""
    data = read_run_data(config, {}, watch.progress, need_weights=labels in ("probe", "deep"))
    bundle = data.bundle
    tokenizer = _tokenizer(config, data)
    limit = position_limit(read_config_file(data.folder))
    findings = [*bundle.findings, *audit_texts(bundle, tokenizer, asked=config.max_seq_length, limit=limit)]
    wrote = None
    if labels != "off":
        suspicious, wrote = _judge(config, data, tokenizer, labels, review_file, watch)
        findings += suspicious
    return AuditResult(sort_findings(findings), {s: len(p) for s, p in bundle.parts.items()}, wrote)


def _tokenizer(config: RunConfig, data: RunData) -> Any:
    if config.tokenizer_name is None:
        return load_tokenizer(data.folder)
    return load_tokenizer(config.tokenizer_name, revision=config.model_revision, allow_download=config.allow_download)


def _judge(
    config: RunConfig, data: RunData, tokenizer: Any, method: LabelJudge, review_file: str | None, watch: Watch
) -> tuple[list[Finding], str | None]:
    bundle = data.bundle
    rows, texts, ids = _labelled_rows(bundle, MOST_JUDGED[method])
    if bundle.labels.task is Task.MULTILABEL or len(rows) < FEWEST_JUDGED or len(np.unique(ids)) < 2:
        return [], None
    features = word_space([" ".join(row) for row in texts])
    if method in ("probe", "deep"):
        from tunesmith.session.frozen_text import embed_rows

        frozen = embed_rows(data.folder, tokenizer, bundle.labels, texts, watch)
        features = join_features(frozen, features)
    judged = judge_labels(features, ids, bundle.labels)
    if method == "deep":
        from tunesmith.session.deep_labels import judge_by_folds, merge_judges

        judged = merge_judges(judged, judge_by_folds(config, bundle, texts, ids, watch), ids, bundle.labels)
    suspects = rank_suspects(judged, ids, bundle.labels)
    where = review_file if suspects else None
    part = bundle.parts["train"]
    numbers = rows if part.rows is None else part.rows[rows]
    if where is not None:
        names = list(bundle.columns.text)
        write_new(Path(where), format_review(suspects, numbers, texts, ids, bundle.labels, names))
    return describe_suspects(suspects, numbers, ids, bundle.labels, len(part), METHODS[method], where), where


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
