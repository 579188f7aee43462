"""The audit of the rows of all splits: everything that can be found before a tokenizer or a model is loaded; and the findings
about the labels alone: rare ones, one that is nearly all, what a constant answer scores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tunesmith.audit.giveaways import MOST_ROWS, find_giveaways, text_features
from tunesmith.audit.near_duplicates import find_near
from tunesmith.audit.overlaps import find_overlaps
from tunesmith.audit.split_drift import find_drift
from tunesmith.audit.text_survey import Ints, RowSample, TextSurvey, sample_rows, survey_texts
from tunesmith.errors import DataError
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.columns import Columns
from tunesmith.reading.label_survey import find_alikes
from tunesmith.reading.source import Part

RANKS = {"error": 0, "warning": 1, "info": 2}


def audit_rows(
    parts: Mapping[str, Part], columns: Columns, labels: LabelMap, *, names_given: bool = False
) -> list[Finding]:
    """Findings, most serious first. Texts are equal when they are after " ".join(text.lower().split()).

    `names_given`: a person listed the labels, so labels that look alike are meant.
    """
    ordered = {"train": parts["train"], **parts} if "train" in parts else dict(parts)
    ids = {split: label_ids(part) for split, part in ordered.items()}
    findings = check_labels(ids, labels, names_given=names_given)
    if not sum(map(len, ordered.values())):
        return findings
    text = list(columns.text)
    with tempfile.TemporaryDirectory(prefix="tunesmith-audit-") as folder:
        survey = survey_texts(ordered, text, Path(folder))
        train_texts = len(ordered.get("train", ())) * len(text)
        near = find_near(survey, train_texts)
    survey.starts, survey.sizes = np.empty(0, np.int64), np.empty(0, np.int32)  # the scratch files are gone
    findings += find_overlaps(ordered, survey, near, labels, ids)
    samples = {
        split: sample_rows(part, _names(part, columns), MOST_ROWS) for split, part in ordered.items() if len(part)
    }
    if "train" in samples:
        findings += _giveaways(samples["train"], survey, ids["train"], labels, columns)
    texts = {
        split: [" ".join(row) for row in zip(*(s.columns[n] for n in text), strict=True)]
        for split, s in samples.items()
    }
    if len(samples) > 1:
        lengths = {split: survey.of(split, survey.characters).sum(axis=1) for split in samples}
        findings += find_drift({split: ids[split] for split in samples}, lengths, texts, labels)
    return sort_findings(findings)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Most serious first."""
    return sorted(findings, key=lambda finding: RANKS[finding.severity])


def require_clean(findings: Sequence[Finding], *, strict: bool) -> None:
    """A DataError that lists every warning, where data without any is asked for."""
    bad = [finding for finding in findings if finding.severity != "info"]
    if strict and bad:
        listed = "".join(f"\n  {finding.code}: {finding.evidence}" for finding in bad)
        fix = "Correct the data, or leave --strict_data out"
        raise DataError(
            f"the audit has {len(bad)} warning{'s' * (len(bad) > 1)}, and --strict_data is set:{listed}", fix=fix
        )


def _names(part: Part, columns: Columns) -> list[str]:
    others = [name for name in part.source.column_names if name not in (*columns.text, columns.label, "labels")]
    return [*columns.text, *others[:20]]


def _giveaways(sample: RowSample, survey: TextSurvey, ids: Ints, labels: LabelMap, columns: Columns) -> list[Finding]:
    keys = survey.of("train", survey.keys)
    ordered, wanted = (
        np.sort(keys, axis=None),
        keys[sample.rows],
    )  # one copy, not the four of np.unique with its inverse
    often = np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")
    del ordered
    size = survey.of("train", survey.characters)[sample.rows]
    features = text_features(sample, columns.text, size, often, len(keys))
    return find_giveaways(sample, features, keys[sample.rows].sum(axis=1), ids[sample.rows], labels, columns.text)


RARE_ROWS = 10
IMBALANCE_SHARE = 0.8


def label_ids(part: Part) -> Ints:
    """The encoded labels: ids, numbers, or one row of 0 and 1 for each row."""
    column = part.labels()
    if hasattr(column.type, "value_type"):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        shaped: Ints = flat.reshape(len(column), -1)
        return shaped
    ids: Ints = column.to_numpy(zero_copy_only=False)
    return ids.astype(np.int32) if ids.dtype == np.int64 else ids


def check_labels(ids: Mapping[str, Ints], labels: LabelMap, *, names_given: bool) -> list[Finding]:
    """`names_given`: a person listed the labels, so labels that look alike are meant."""
    if labels.task is Task.REGRESSION or "train" not in ids:
        return []
    counts = count_labels_of(ids["train"], labels)
    findings = []
    if not names_given:
        findings += find_alikes(dict(zip(labels.names, map(int, counts), strict=True)))
    findings += _rare(counts, labels)
    if labels.task is Task.MULTILABEL:
        return findings
    top = int(counts.argmax())
    for split in [name for name in ids if name != "train"] or ["train"]:
        findings += _majority(split, count_labels_of(ids[split], labels), top, labels)
    share = float(counts[top] / max(counts.sum(), 1))
    if share >= IMBALANCE_SHARE:
        evidence = f"{share:.1%} of train rows have the label {labels.names[top]!r}."
        steps = ("Judge by macro F1 or MCC, not accuracy.", "Try class weights (--class_weights balanced).")
        findings.append(Finding("imbalance", "warning", evidence, steps, numbers={"share": share}))
    return findings


def count_labels_of(ids: Ints, labels: LabelMap) -> Ints:
    """Rows of each label."""
    if labels.task is Task.MULTILABEL:
        return np.asarray(ids.sum(axis=0) if len(ids) else np.zeros(len(labels)), dtype=np.int64)
    return np.bincount(ids[ids >= 0], minlength=len(labels))


def _rare(counts: Ints, labels: LabelMap) -> list[Finding]:
    rare = [(name, int(n)) for name, n in zip(labels.names, counts, strict=True) if n < RARE_ROWS]
    if not rare:
        return []
    shown = ", ".join(f"{name!r} ({n})" for name, n in rare[:8])
    more = f" and {len(rare) - 8} more" if len(rare) > 8 else ""
    evidence = f"Labels with fewer than {RARE_ROWS} train rows: {shown}{more}."
    advice = ("Add rows, merge labels, or correct the label if it is a typing error.",)
    return [Finding("rare_labels", "warning", evidence, advice, numbers={"labels": dict(rare)})]


def _majority(split: str, counts: Ints, top: int, labels: LabelMap) -> list[Finding]:
    total = int(counts.sum())
    if not total:
        return []
    accuracy = float(counts[top] / total)
    name = labels.names[top]
    evidence = f"Always answering {name!r} is right on {accuracy:.1%} of the {total:,} labelled {split} rows."
    advice = ("A model is worth something only above that accuracy.",)
    numbers = {"split": split, "label": name, "accuracy": accuracy, "rows": total}
    return [Finding("majority_baseline", "info", evidence, advice, numbers=numbers)]
