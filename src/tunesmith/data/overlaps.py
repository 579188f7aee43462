"""Findings about texts that occur more than once: within a split, across splits, with other labels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tunesmith.data.near_duplicates import CLOSE, NearTexts, first_equal
from tunesmith.data.source import Part
from tunesmith.data.text_survey import Ints, TextSurvey
from tunesmith.findings import Finding, Severity
from tunesmith.labels import LabelMap, Task

LEAK_SHARE = 0.01
"""Share of the rows of a split that are in train, equal or nearly so, from which its score is too good to be trusted."""
REPEAT_SHARE = 0.2
CONTRADICTION_SHARE = 0.005
CONSTANT_SHARE = 0.05
CLOSE_SHARE = 0.2
"""Share of the rows of a split that are close to a train row and have its label, from which this is worth a warning."""
SHOWN = 10


def find_overlaps(
    parts: Mapping[str, Part], survey: TextSurvey, near: NearTexts, labels: LabelMap, ids: Mapping[str, Ints]
) -> list[Finding]:
    """Repeats, leaks, contradictions, swapped pairs, texts that stand in many rows. `ids` are the labels by split."""
    own = np.arange(len(near.equal), dtype=np.int32)
    equal = np.where(near.equal >= 0, near.equal, own)
    alike = near_roots(near.earlier(near.least), equal)
    findings: list[Finding] = []
    rows = {split: (survey.of(split, equal), survey.of(split, alike)) for split in parts}
    for split, (exact, like) in rows.items():
        if split != "train" and "train" in rows:
            same = _agreement(like, rows["train"][1], ids[split], ids["train"], labels)
            findings += _leaks(split, exact, like, *rows["train"], same, complete=near.complete)
        findings += _repeats(split, exact, like, complete=near.complete)
        findings += _swaps(split, exact)
        findings += _constant(split, exact, survey.of(split, survey.characters))
    if near.least >= CLOSE + 10 and "train" in rows:
        close = near_roots(near.earlier(CLOSE), equal)
        findings += _close_by_nature(near, {split: survey.of(split, close) for split in parts}, ids, labels)
    return findings + _contradictions({split: found[0] for split, found in rows.items()}, ids, labels)


def _close_by_nature(
    near: NearTexts, rows: Mapping[str, Ints], ids: Mapping[str, Ints], labels: LabelMap
) -> list[Finding]:
    """Where nearness alone is no sign of a copy: rows of a template, one word changed, made from each other."""
    least = "" if near.complete else "At least "
    evidence = (
        f"{least}{near.by_nature:.0%} of the train texts are close to another one, as texts of one template are. So texts "
        f"are called nearly equal here from {near.least}% of their letter pairs in common, not from {CLOSE}%."
    )
    severity: Severity = "info"
    train = row_keys(np.sort(rows["train"], axis=1))
    numbers: dict[str, object] = {"share": near.by_nature, "least_percent": near.least}
    for split, found in rows.items():
        if split == "train":
            continue
        share = numbers[f"{split}_share"] = float(np.isin(row_keys(np.sort(found, axis=1)), train).mean())
        if share >= CLOSE_SHARE and _agreement(found, rows["train"], ids[split], ids["train"], labels):
            severity = "warning"
            evidence += f" {share:.0%} of the {split} rows are close to a train row, mostly with its label."
    advice = ("If rows were made from each other, keep all that were made from one row on one side of the split.",)
    return [Finding("close_by_nature", severity, evidence, advice, numbers=numbers)]


def near_roots(earlier: Ints, equal: Ints) -> Ints:
    """For each text the first of those that are equal or nearly so, along the chain of earlier ones."""
    parent = np.where(earlier >= 0, earlier, np.arange(len(earlier), dtype=np.int32))
    parent = parent[equal]
    while True:
        above = parent[parent]
        if (above == parent).all():
            return parent
        parent = above


def _agreement(like: Ints, train: Ints, ids: Ints, train_ids: Ints, labels: LabelMap) -> bool:
    """Whether rows that are nearly in train have the label of the row there, more often than by chance."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return True
    keys, first = np.unique(row_keys(np.sort(train, axis=1)), return_index=True)
    mine = row_keys(np.sort(like, axis=1))
    place = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
    there = (keys[place] == mine) & (ids >= 0)
    if there.sum() < 10:
        return True
    given, seen = ids[there], train_ids[first[place[there]]]
    share, chance = float((given == seen).mean()), float(np.bincount(given).max() / len(given))
    return share > chance + 2 * float(np.sqrt(chance * (1 - chance) / len(given)))


def _leaks(
    split: str, exact: Ints, like: Ints, train: Ints, train_like: Ints, agree: bool, *, complete: bool
) -> list[Finding]:
    whole = np.isin(row_keys(np.sort(exact, axis=1)), row_keys(np.sort(train, axis=1)))
    nearly = np.isin(row_keys(np.sort(like, axis=1)), row_keys(np.sort(train_like, axis=1))) & ~whole
    shared = np.isin(exact, np.unique(train)).any(axis=1)
    count = int((whole | nearly).sum())
    numbers = {
        "split": split,
        "rows": len(exact),
        "equal_rows": int(whole.sum()),
        "near_rows": int(nearly.sum()),
        "shared_rows": int(shared.sum()),
        "first_rows": _first(whole | nearly),
    }
    findings = []
    if count:
        least, so = "" if complete else "at least ", " or nearly so" if nearly.any() else ""
        evidence = (
            f"{least}{count:,} of {len(exact):,} {split} rows are in train{so}: {int(whole.sum()):,} equal, "
            f"{int(nearly.sum()):,} nearly equal (first: {_rows(numbers['first_rows'])})."
        )
        steps = [f"Remove them from train or from {split}: the {split} score is too good by what was memorised."]
        if not whole.any():
            steps.append("If rows are made from templates, keep all rows of one template on one side.")
        serious = count if agree else int(whole.sum())
        if not agree:
            evidence += " The nearly equal ones have another label as often as by chance."
        severity: Severity = "warning" if serious >= max(3, LEAK_SHARE * len(exact)) else "info"
        findings.append(
            Finding("split_leak", severity, evidence[0].upper() + evidence[1:], tuple(steps), numbers=numbers)
        )
    only = int((shared & ~whole & ~nearly).sum())
    if exact.shape[1] == 2 and only:
        evidence = f"{only:,} of {len(exact):,} {split} pairs have one sentence that is in train, in another pair."
        keep = f"Keep all pairs of a sentence on one side to score unseen sentences only; {split} mixes both."
        findings.append(Finding("shared_sentences", "info", evidence, (keep,), numbers=numbers))
    return findings


def _repeats(split: str, exact: Ints, like: Ints, *, complete: bool) -> list[Finding]:
    repeated = _again(exact)
    near = _again(like) & ~repeated
    many = repeated.sum() >= REPEAT_SHARE * len(repeated) and len(repeated) >= 20
    least = "" if complete else "At least "
    advice = "Remove the repeats unless {}: they weigh more than other rows."
    what, meant = "repeat the text of an earlier row", advice.format("they are meant")
    found = [_of_rows("duplicate_rows", "warning" if many else "info", split, repeated, what, meant)]
    what, meant = "nearly repeat the text of an earlier row", advice.format("the rows come from a template")
    found.append(_of_rows("near_duplicate_rows", "info", split, near, what, meant, least))
    return [finding for finding in found if finding.numbers["rows"]]


def _of_rows(code: str, severity: Severity, split: str, rows: Ints, what: str, advice: str, least: str = "") -> Finding:
    """A finding about the rows of a split for which `rows` is true."""
    numbers = {"split": split, "rows": int(rows.sum()), "of": len(rows), "first_rows": _first(rows)}
    first = _rows(numbers["first_rows"])
    evidence = f"{least}{numbers['rows']:,} of {len(rows):,} {split} rows {what} (first: {first})."
    return Finding(code, severity, evidence, (advice,), numbers=numbers)


def _again(rows: Ints) -> Ints:
    """Rows whose key an earlier row has."""
    again: Ints = first_equal(row_keys(rows)) >= 0
    return again


def _swaps(split: str, rows: Ints) -> list[Finding]:
    if rows.shape[1] != 2:
        return []
    ascending = np.unique(row_keys(rows[rows[:, 0] < rows[:, 1]]))
    descending = np.unique(row_keys(rows[rows[:, 0] > rows[:, 1]][:, ::-1]))
    swapped = len(np.intersect1d(ascending, descending, assume_unique=True))
    if not swapped:
        return []
    evidence = f"{swapped:,} {split} pairs also occur with their two texts swapped."
    advice = ("Keep one of the two, unless the order matters.",)
    return [Finding("swapped_pairs", "info", evidence, advice, numbers={"split": split, "pairs": swapped})]


def _constant(split: str, rows: Ints, characters: Ints) -> list[Finding]:
    """Texts that are empty, and one text in a large share of the rows of its column."""
    findings = []
    empty = (characters == 0).any(axis=1)
    if empty.any():
        advice = "Fill them in or remove them: a model can only guess there."
        findings.append(_of_rows("empty_text", "warning", split, empty, "have an empty text", advice))
    for column in range(rows.shape[1]):
        texts, counts = np.unique(rows[:, column], return_counts=True)
        top = int(counts.max(initial=0))
        if top >= max(20, CONSTANT_SHARE * len(rows)):
            same = rows[:, column] == texts[counts.argmax()]
            what = "have one and the same text" + ("" if rows.shape[1] == 1 else f" as text {column + 1}")
            advice = "Check that the text column is the right one, and whether this text is a placeholder."
            severity: Severity = "warning" if rows.shape[1] == 1 or top == len(rows) else "info"
            findings.append(_of_rows("constant_text", severity, split, same, what, advice))
    return findings


def _contradictions(rows: Mapping[str, Ints], ids: Mapping[str, Ints], labels: LabelMap) -> list[Finding]:
    """Rows with the same text and another label (other labels, a number far away), in all labelled rows together."""
    first = first_equal(np.concatenate([row_keys(found) for found in rows.values()]))
    group = np.where(first >= 0, first, np.arange(len(first), dtype=np.int32))
    given, apart, what = np.concatenate([ids[split] for split in rows]), 0.0, "a different label"
    if labels.task is Task.MULTILABEL:
        known, what = np.isfinite(given).all(axis=1), "different labels"
        given = np.unique(given, axis=0, return_inverse=True)[1].reshape(-1)
    elif labels.task is Task.REGRESSION:
        known = np.isfinite(given)
        apart = float(given[known].std()) if known.any() else 0.0
        what = f"a number more than {apart:.2g} away (a standard deviation)"
    else:
        known = given >= 0
    low = np.where(known, given, given[known].max(initial=0))
    high = np.where(known, given, given[known].min(initial=0))
    np.minimum.at(low, group[known], given[known])
    np.maximum.at(high, group[known], given[known])
    wrong = (high - low > apart)[group] & known
    findings, at = [], 0
    for split, found in rows.items():
        here = wrong[at : at + len(found)]
        at += len(found)
        if here.any():
            severity: Severity = "warning" if here.sum() >= CONTRADICTION_SHARE * len(found) else "info"
            text = f"have the same text as another row but {what}"
            advice = "Decide which label is right: no model can get both."
            findings.append(_of_rows("contradicting_labels", severity, split, here, text, advice))
    return findings


def row_keys(rows: Ints) -> Ints:
    """One number for each row; text numbers fit 31 bits, so two of them fit one int64."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    wide = rows.astype(np.int64)
    keys: Ints = (wide[:, 0] << 31) | wide[:, 1]
    return keys


def _first(rows: Ints) -> list[int]:
    """Row numbers from 1, the first few."""
    found: list[int] = (np.flatnonzero(rows)[:SHOWN] + 1).tolist()
    return found


def _rows(numbers: object) -> str:
    shown = numbers[:3] if isinstance(numbers, list) else []
    return f"row{'s' if len(shown) > 1 else ''} {', '.join(f'{n:,}' for n in shown)}"
