"""What the tokenizer of a run makes of its texts, as findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.audit.readable import MOST_ROWS, check_cut, check_tokens
from tunesmith.audit.row_audit import require_clean, sort_findings
from tunesmith.audit.row_sample import sample_rows
from tunesmith.findings import Finding
from tunesmith.reading.load import DataBundle
from tunesmith.session.watch import Say
from tunesmith.tokens.tokenize import Tokenized, longest_allowed


def audit_texts(bundle: DataBundle, tokenizer: Any, *, asked: int | None, limit: int | None) -> list[Finding]:
    """From a sample of each split: unknown tokens, scripts, languages, and how many rows would be cut."""
    names = list(bundle.columns.text)
    samples = {split: sample_rows(part, names, MOST_ROWS).columns for split, part in bundle.parts.items() if len(part)}
    texts = {split: [text for name in names for text in columns[name]] for split, columns in samples.items()}
    train = samples["train"]
    rows = tokenizer(*(train[name] for name in names), truncation=False, verbose=False)["input_ids"]
    length = longest_allowed(tokenizer, model_max=limit, asked=asked)
    return [*check_tokens(texts, tokenizer), *_cut(np.array([len(row) for row in rows]), length, limit)]


def audit_tokenized(
    bundle: DataBundle, tokenizer: Any, train: Tokenized, *, length: int, limit: int | None
) -> list[Finding]:
    """The same for a run, whose rows are tokenized already."""
    names = list(bundle.columns.text)
    samples = {split: sample_rows(part, names, MOST_ROWS).columns for split, part in bundle.parts.items() if len(part)}
    texts = {split: [text for name in names for text in columns[name]] for split, columns in samples.items()}
    table = train.dataset.with_format("numpy")
    return [
        *check_tokens(texts, tokenizer),
        *_cut(np.asarray(table["length"][:]) + np.asarray(table["cut"][:]), length, limit),
    ]


def add_findings(bundle: DataBundle, findings: Sequence[Finding], say: Say, *, strict: bool) -> DataBundle:
    """The bundle with findings added, most serious first; warnings are shown."""
    for finding in findings:
        if finding.severity != "info":
            say(finding.line())
    require_clean(findings, strict=strict)
    return replace(bundle, findings=tuple(sort_findings([*bundle.findings, *findings])))


def _cut(lengths: Any, length: int, limit: int | None) -> list[Finding]:
    over = np.maximum(lengths - length, 0)
    longest = int(np.quantile(lengths, 0.99)) if len(lengths) else 0
    return check_cut(len(lengths), int((over > 0).sum()), int(lengths.sum()), int(over.sum()), longest, limit, length)
