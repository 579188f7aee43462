"""Findings about labels: rare ones, one that is nearly all, what a constant answer scores, labels that a person reads as one and
the data holds as two; and what gives the label away without reading the text: length, frequency, place in the file, ids, dates,
other columns.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tunesmith.data.label_survey import alike, fold_case, fold_number, visible
from tunesmith.data.source import Part
from tunesmith.data.text_survey import Ints, RowSample
from tunesmith.errors import first_few
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task

RARE_ROWS = 10
IMBALANCE_SHARE = 0.8
SHOWN = 4
_FIX = "Write both the same in the data, or list both in --label_names to keep them apart."


def label_ids(part: Part) -> Ints:
    """The encoded labels: ids, numbers, or one row of 0 and 1 for each row."""
    column = part.labels()
    if hasattr(column.type, "value_type"):
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1))
    ids: Ints = column.to_numpy(zero_copy_only=False)
    return ids.astype(np.int32) if ids.dtype == np.int64 else ids


def check_labels(ids: Mapping[str, Ints], labels: LabelMap, *, names_given: bool) -> list[Finding]:
    """`names_given`: the user listed the labels, so similar names are intended."""
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
    shown = first_few([f"{name!r} ({n})" for name, n in rare], 8)
    evidence = f"Labels with fewer than {RARE_ROWS} train rows: {shown}."
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
"""The difference -> a key that ignores it, the most specific first."""


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
    shown = first_few([f"{a!a} ({counts[a]:,} rows) and {b!a} ({counts[b]:,})" for a, b in pairs], SHOWN)
    evidence = f"Labels that differ only {kind} are separate classes: {shown}."
    return Finding("labels_alike", "warning", evidence, (_FIX,), numbers={"pairs": [list(p) for p in pairs[:SHOWN]]})


def _blank(names: list[str], counts: Mapping[str, int]) -> Finding | None:
    if not names:
        return None
    shown = ", ".join(f"{name!a} ({counts[name]:,} rows)" for name in names[:SHOWN])
    fix = "Write the label in, remove the rows, or give it a name with --label_names."
    return Finding("blank_label", "warning", f"A label is blank: {shown}.", (fix,), numbers={"labels": names[:SHOWN]})


MOST_ROWS = 20_000
FEWEST_ROWS = 40
FOLDS = 5
LARGE_SHARE = 0.5
"""From this share of the constant answer's errors removed without reading the text, it is a warning."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
DATE = re.compile(r"\b(?:(?:19|20)\d\d[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.](?:19|20)\d\d)\b")


@dataclass(frozen=True)
class ContentFree:
    """What a small tree scores from some features, out of fold: accuracy (R2 for numbers), and a constant answer."""

    name: str
    score: float
    constant: float
    sure: bool

    @property
    def gone(self) -> float:
        """The share of the constant answer's errors that is removed."""
        return max(0.0, (self.score - self.constant) / max(1 - self.constant, 1e-9)) if self.sure else 0.0


def find_giveaways(
    sample: RowSample, features: Mapping[str, Ints], keys: Ints, ids: Ints, labels: LabelMap, text: Sequence[str]
) -> list[Finding]:
    """`features`: name -> (rows, values) of the sample; `keys`: rows with the same one fall into one fold."""
    known = np.isfinite(ids) if labels.task is Task.REGRESSION else ids >= 0
    if labels.task is Task.MULTILABEL or known.sum() < FEWEST_ROWS or len(np.unique(ids[known])) < 2:
        return []
    folds = (keys[known] % np.uint64(FOLDS)).astype(np.int64)
    regression = labels.task is Task.REGRESSION
    found = [judge_features(n, v[known], ids[known], folds, regression=regression) for n, v in features.items()]
    findings = [_baseline(found, regression=regression), *(_giveaway(one, regression=regression) for one in found)]
    for name, cells in sample.columns.items():
        if name not in text:
            values = column_features([cell for cell, good in zip(cells, known, strict=True) if good])
            one = judge_features(f"column {name!r}", values, ids[known], folds, regression=regression)
            findings.append(_column(name, one, cells, len(labels), regression=regression))
    findings.append(_named(sample, ids, labels, text))
    return [finding for finding in findings if finding is not None]


def judge_features(name: str, values: Ints, ids: Ints, folds: Ints, *, regression: bool) -> ContentFree:
    """Out-of-fold score of a tree over these features."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    leaf = max(5, len(ids) // 500)
    kind = DecisionTreeRegressor if regression else DecisionTreeClassifier
    answers = np.zeros(len(ids), dtype=np.float64 if regression else ids.dtype)
    constant, most = answers.copy(), 0 if regression else int(np.bincount(ids).argmax())
    for fold in np.unique(folds):
        here = folds == fold
        if here.all() or len(np.unique(ids[~here])) < 2:
            return ContentFree(name, 0.0, 0.0, False)
        tree = kind(max_leaf_nodes=64, min_samples_leaf=leaf, random_state=0).fit(values[~here], ids[~here])
        answers[here] = tree.predict(values[here])
        constant[here] = ids[~here].mean() if regression else most
    if regression:
        gain = (ids - constant) ** 2 - (ids - answers) ** 2
        score, floor = 1 - ((ids - answers) ** 2).sum() / max(((ids - constant) ** 2).sum(), 1e-12), 0.0
    else:
        gain = (answers == ids).astype(float) - (constant == ids)
        score, floor = float((answers == ids).mean()), float(np.bincount(ids).max() / len(ids))
    error = float(gain.std()) / np.sqrt(len(gain))
    return ContentFree(name, float(score), floor, bool(gain.mean() > 4 * error))


def _baseline(found: Sequence[ContentFree], *, regression: bool) -> Finding | None:
    shown = [one for one in found if one.sure and one.name != PLACE]  # no model sees the place
    if not shown:
        return None
    unit = "R2 {:.2f}" if regression else "{:.1%}"
    words = ", ".join(f"{one.name} {unit.format(one.score)}" for one in sorted(shown, key=lambda one: -one.score))
    floor = "" if regression else f" (the most frequent label: {shown[0].constant:.1%})"
    evidence = f"Without reading a word, a small tree scores, out of fold: {words}{floor}."
    numbers = {one.name: one.score for one in found} | {"constant": shown[0].constant}
    advice = ("A model that reads must be clearly above that.",)
    return Finding("content_free_baseline", "info", evidence, advice, numbers=numbers)


def _giveaway(one: ContentFree, *, regression: bool) -> Finding | None:
    if one.gone < LARGE_SHARE:
        return None
    numbers = {"feature": one.name, "score": one.score, "constant": one.constant}
    if one.name == PLACE:
        evidence = f"Rows of one label stand together in the file: the row number alone is right on {one.score:.1%}."
        advice = ("Shuffle it before rows are taken by their place (--max_train_samples, a split by hand).",)
        return Finding("sorted_by_label", "info", evidence, advice, numbers=numbers)
    says = f"R2 {one.score:.2f}" if regression else f"{one.score:.1%} of the labels"
    evidence = f"{one.name[0].upper()}{one.name[1:]} gives {says} away without reading the text."
    advice = (
        "Find out how the rows were made: a model learns this instead of the text, and new rows will not have it.",
    )
    return Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)


def _column(name: str, one: ContentFree, cells: Sequence[Any], labels: int, *, regression: bool) -> Finding | None:
    if one.gone < 0.8:
        return None
    numbers = {"column": name, "score": one.score, "constant": one.constant}
    says = f"R2 {one.score:.2f}" if regression else f"{one.score:.1%} of the labels"
    if len({str(cell) for cell in cells}) <= max(2 * labels, 10):
        evidence = f"The column {name!r} says the same as the label ({says}). It is not read."
        return Finding("column_repeats_label", "info", evidence, numbers=numbers)
    evidence = f"The column {name!r} gives {says} away: its ids or dates go by label. The model does not read it."
    advice = (
        "Check how the rows were collected: labels that follow ids or dates often differ in source, not in meaning.",
    )
    return Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)


def _named(sample: RowSample, ids: Ints, labels: LabelMap, text: Sequence[str]) -> Finding | None:
    """Finds label names that occur in the text of most rows of that label and hardly in others."""
    if labels.task is Task.REGRESSION or not all(len(name) > 2 and not name.isdigit() for name in labels.names):
        return None
    low = [" ".join(str(sample.columns[name][row]).lower() for name in text) for row in range(len(ids))]
    named = [[name.lower() in words for words in low] for name in labels.names]
    inside = np.array(named, dtype=bool).T
    known = ids >= 0
    own = inside[np.arange(len(ids)), np.maximum(ids, 0)][known]
    alone = own & (inside[known].sum(axis=1) == 1)
    if alone.mean() < 0.8:
        return None
    evidence = f"{alone.mean():.1%} of the train rows hold the name of their own label, and of no other, in the text."
    advice = ("Remove the label from the text: the model learns to look it up.",)
    numbers = {"feature": "label name", "score": float(alone.mean())}
    return Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)


PLACE = "place in the file"


def text_features(
    sample: RowSample, text: Sequence[str], characters: Ints, counts: Ints, part_rows: int
) -> dict[str, Ints]:
    """Features that ignore the words. `characters`, `counts`: (rows, texts) of the sample."""
    length = [characters, characters[:, :1] / np.maximum(characters[:, -1:], 1)]
    return {
        "length": np.concatenate(length, axis=1),
        "how often its text occurs": counts.astype(np.float64),
        PLACE: (sample.rows / max(part_rows, 1))[:, None],
        "ids and dates in the text": np.concatenate([_numbers_in(sample.columns[name]) for name in text], axis=1),
    }


def _numbers_in(cells: Sequence[Any]) -> Ints:
    """First number, last number, digits, and whether there is a date."""
    values = np.full((len(cells), 4), -1.0)
    for at, cell in enumerate(cells):
        found = NUMBER.findall(str(cell)[:2_000])
        if found:
            dated = bool(DATE.search(str(cell)[:2_000]))
            values[at] = (float(found[0][:15]), float(found[-1][:15]), len("".join(found)), dated)
    return values


def column_features(cells: Sequence[Any]) -> Ints:
    """First and last number of each cell, all of its digits as one, and a code for the words around them."""
    texts = ["" if cell is None else str(cell) for cell in cells]
    numbers = [NUMBER.findall(text) or ["-1"] for text in texts]
    ends = [np.array([float(found[at][:15]) for found in numbers]) for at in (0, -1)]
    digits = np.array([float("".join(found)[:15].replace(".", "")) for found in numbers])
    words = [re.sub(r"\d+", "", text) for text in texts]
    codes = {word: code for code, word in enumerate(dict.fromkeys(words))}
    code = np.array([codes[word] for word in words], dtype=np.float64)
    return np.stack([*ends, digits, code if len(codes) <= len(cells) // 4 else np.zeros(len(cells))], axis=1)
