"""Findings about the labels alone: rare ones, one that is nearly all, what a constant answer scores, and labels that a person
reads as one and the data holds as two.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from tunesmith.audit.text_survey import Ints
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.label_survey import alike, fold_case, fold_number, visible
from tunesmith.reading.source import Part

RARE_ROWS = 10
IMBALANCE_SHARE = 0.8
SHOWN = 4
_FIX = "Write both the same in the data, or list both in --label_names to keep them apart."


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


_KEYS: dict[str, Callable[[str], str]] = {
    "in their Unicode form (an accent of its own or within the letter)": partial(unicodedata.normalize, "NFC"),
    "in invisible characters": visible,
    "in the way a number is written": fold_number,
    "in case or spaces": fold_case,
    "in several of these": alike,
}
"""How they differ -> what is then equal, the narrowest first."""


def find_alikes(counts: Mapping[str, int]) -> list[Finding]:
    """One warning for each way in which labels look alike; `counts` has the train rows of each label."""
    findings = [_blank([name for name in counts if not visible(name).strip()], counts)]
    known: set[frozenset[str]] = set()
    for kind, key in _KEYS.items():
        groups: dict[str, list[str]] = {}
        for name in counts:
            groups.setdefault(key(name), []).append(name)
        pairs = [(group[0], other) for group in groups.values() for other in group[1:]]
        pairs = [pair for pair in pairs if frozenset(pair) not in known]
        known |= {frozenset(pair) for pair in pairs}
        findings.append(_warning(kind, pairs, counts))
    return [finding for finding in findings if finding is not None]


def _warning(kind: str, pairs: list[tuple[str, str]], counts: Mapping[str, int]) -> Finding | None:
    if not pairs:
        return None
    shown = ", ".join(f"{a!a} ({counts[a]:,} rows) and {b!a} ({counts[b]:,})" for a, b in pairs[:SHOWN])
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    evidence = f"Labels that differ only {kind} are separate classes: {shown}{more}."
    return Finding("labels_alike", "warning", evidence, (_FIX,), numbers={"pairs": [list(p) for p in pairs[:SHOWN]]})


def _blank(names: list[str], counts: Mapping[str, int]) -> Finding | None:
    if not names:
        return None
    shown = ", ".join(f"{name!a} ({counts[name]:,} rows)" for name in names[:SHOWN])
    fix = "Write the label in, remove the rows, or give it a name with --label_names."
    return Finding("blank_label", "warning", f"A label is blank: {shown}.", (fix,), numbers={"labels": names[:SHOWN]})
