"""What is true about the rows and may mislead: repeats, contradictions, sentences on both sides of a split, rare labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunesmith.data.label_alikes import find_alikes
from tunesmith.data.part import Part
from tunesmith.data.sentences import number_sentences
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task

MAX_ROWS = 500_000
"""Above this, all splits together, texts are not compared; labels still are."""

RARE_ROWS = 10
IMBALANCE_SHARE = 0.8
Ints = np.ndarray[Any, Any]


def audit_parts(
    parts: Mapping[str, Part], text: Sequence[str], labels: LabelMap, *, names_given: bool = False
) -> list[Finding]:
    """Findings, most serious first. Texts are equal when they are after " ".join(text.lower().split()).

    `names_given`: a person listed the labels, so labels that look alike are meant.
    """
    findings = _label_findings(parts, labels)
    if not names_given and labels.task is not Task.REGRESSION and "train" in parts:
        findings += find_alikes(dict(zip(labels.names, map(int, _count(parts["train"], labels)), strict=True)))
    rows = sum(len(part) for part in parts.values())
    if rows > MAX_ROWS:
        evidence = (
            f"{rows:,} rows are more than {MAX_ROWS:,}: texts were not compared for repeats or leaks between splits."
        )
        findings.append(Finding("audit_skipped", "info", evidence, numbers={"rows": rows}))
    elif rows:
        numbers = number_sentences(parts, text)
        findings += _leaks(numbers)
        findings += _repeats(numbers, parts, labels)
    rank = {"error": 0, "warning": 1, "info": 2}
    return sorted(findings, key=lambda finding: rank[finding.severity])


def _leaks(numbers: Mapping[str, Ints]) -> list[Finding]:
    if "train" not in numbers:
        return []
    train = np.unique(numbers["train"])
    train_rows = _keys(np.sort(numbers["train"], axis=1))
    findings = []
    for split, rows in numbers.items():
        if split == "train":
            continue
        shared = int(np.isin(rows, train).any(axis=1).sum())
        whole = int(np.isin(_keys(np.sort(rows, axis=1)), train_rows).sum())
        if not shared:
            continue
        what = "a text" if rows.shape[1] == 1 else "a sentence"
        evidence = f"{shared:,} of {len(rows):,} {split} rows contain {what} that is in train"
        evidence += f", {whole:,} of them the whole row." if rows.shape[1] == 2 else "."
        advice = (f"Remove them from train or from {split}: the {split} score is too good by what was memorised.",)
        counts = {"split": split, "shared_rows": shared, "whole_rows": whole, "rows": len(rows)}
        severity = "warning" if shared >= 0.01 * len(rows) else "info"
        findings.append(Finding("split_leak", severity, evidence, advice, numbers=counts))  # type: ignore[arg-type]
    return findings


def _repeats(numbers: Mapping[str, Ints], parts: Mapping[str, Part], labels: LabelMap) -> list[Finding]:
    findings = []
    for split, rows in numbers.items():
        _, group, counts = np.unique(_keys(rows), return_inverse=True, return_counts=True)
        repeated = int((counts - 1).sum())
        if repeated:
            evidence = f"{repeated:,} of {len(rows):,} {split} rows repeat the text of an earlier row."
            advice = ("Remove the repeats: they weigh more than other rows.",)
            findings.append(
                Finding("duplicate_rows", "info", evidence, advice, numbers={"split": split, "rows": repeated})
            )
        findings += _contradictions(split, parts[split], group, labels)
        findings += _swaps(split, rows)
    return findings


def _contradictions(split: str, part: Part, group: Ints, labels: LabelMap) -> list[Finding]:
    if labels.task in (Task.REGRESSION, Task.MULTILABEL):
        return []
    ids = _labels(part)
    low = np.full(group.max() + 1, np.iinfo(np.int64).max)
    high = np.full(group.max() + 1, -2, dtype=np.int64)
    np.minimum.at(low, group, ids)
    np.maximum.at(high, group, ids)
    rows = np.flatnonzero((low != high)[group])
    if not len(rows):
        return []
    evidence = f"{len(rows):,} {split} rows have the same text as another row but a different label (first: row {rows[0] + 1})."
    advice = ("Decide which label is right: no model can get both.",)
    numbers = {"split": split, "rows": len(rows), "first_rows": (rows[:10] + 1).tolist()}
    return [Finding("contradicting_labels", "warning", evidence, advice, numbers=numbers)]


def _swaps(split: str, rows: Ints) -> list[Finding]:
    if rows.shape[1] != 2:
        return []
    ascending = np.unique(_keys(rows[rows[:, 0] < rows[:, 1]]))
    descending = np.unique(_keys(rows[rows[:, 0] > rows[:, 1]][:, ::-1]))
    swapped = len(np.intersect1d(ascending, descending, assume_unique=True))
    if not swapped:
        return []
    evidence = f"{swapped:,} {split} pairs also occur with their two texts swapped."
    numbers = {"split": split, "pairs": swapped}
    return [
        Finding("swapped_pairs", "info", evidence, ("Keep one of the two, unless the order matters.",), numbers=numbers)
    ]


def _label_findings(parts: Mapping[str, Part], labels: LabelMap) -> list[Finding]:
    if labels.task in (Task.REGRESSION, Task.MULTILABEL) or "train" not in parts:
        return []
    findings = []
    counts = _count(parts["train"], labels)
    rare = [(name, int(n)) for name, n in zip(labels.names, counts, strict=True) if n < RARE_ROWS]
    if rare:
        shown = ", ".join(f"{name!r} ({n})" for name, n in rare[:8])
        more = f" and {len(rare) - 8} more" if len(rare) > 8 else ""
        evidence = f"Labels with fewer than {RARE_ROWS} train rows: {shown}{more}."
        advice = ("Add rows, merge labels, or correct the label if it is a typing error.",)
        findings.append(Finding("rare_labels", "warning", evidence, advice, numbers={"labels": dict(rare)}))
    top = int(counts.argmax())
    share = counts[top] / max(counts.sum(), 1)
    for split in [name for name in parts if name != "train"] or ["train"]:
        findings.extend(_baseline(split, _count(parts[split], labels), top, labels))
    if share >= IMBALANCE_SHARE:
        evidence = f"{share:.1%} of train rows have the label {labels.names[top]!r}."
        steps = ("Judge by macro F1 or MCC, not accuracy.", "Try class weights (--class_weights balanced).")
        findings.append(Finding("imbalance", "warning", evidence, steps, numbers={"share": float(share)}))
    return findings


def _baseline(split: str, counts: Ints, top: int, labels: LabelMap) -> list[Finding]:
    total = int(counts.sum())
    if not total:
        return []
    accuracy = float(counts[top] / total)
    name = labels.names[top]
    evidence = f"Always answering {name!r} is right on {accuracy:.1%} of the {total:,} labelled {split} rows."
    advice = ("A model is worth something only above that accuracy.",)
    numbers = {"split": split, "label": name, "accuracy": accuracy, "rows": total}
    return [Finding("majority_baseline", "info", evidence, advice, numbers=numbers)]


def _count(part: Part, labels: LabelMap) -> Ints:
    ids = _labels(part)
    if labels.task is Task.MULTILABEL:
        return np.stack(list(ids)).sum(axis=0) if len(ids) else np.zeros(len(labels), dtype=np.int64)
    return np.bincount(ids[ids >= 0], minlength=len(labels))


def _labels(part: Part) -> Ints:
    ids: Ints = part.labels().to_numpy(zero_copy_only=False)
    return ids


def _keys(rows: Ints) -> Ints:
    """One number for each row; sentence numbers fit 31 bits, so two of them fit one int64."""
    wide = rows.astype(np.int64)
    keys: Ints = wide[:, 0] if rows.shape[1] == 1 else (wide[:, 0] << 31) | wide[:, 1]
    return keys
