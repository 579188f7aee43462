"""The audit of the rows of all splits: what can be found before a tokenizer or a model is loaded; and whether a split is
drawn from the same rows as train: labels, lengths, words.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tunesmith.data.columns import Columns
from tunesmith.data.label_values import alike, fold_case, fold_number, visible
from tunesmith.data.near_duplicates import (
    CLOSE,
    NearTexts,
    RowSample,
    TextSurvey,
    find_near,
    first_equal,
    sample_rows,
    survey_texts,
)
from tunesmith.data.source import Ints, Part
from tunesmith.errors import DataError, first_few
from tunesmith.findings import Finding, Severity
from tunesmith.labels import LabelMap, Task

RANKS = {"error": 0, "warning": 1, "info": 2}


def audit_rows(
    parts: Mapping[str, Part], columns: Columns, labels: LabelMap, *, names_given: bool = False
) -> list[Finding]:
    """Findings, most serious first. Texts are equal when they are after " ".join(text.lower().split()).

    `names_given`: the user listed the labels, so similar names are intended.
    """
    ordered = {"train": parts["train"], **parts} if "train" in parts else dict(parts)
    ids = {split: label_ids(part) for split, part in ordered.items()}
    findings = check_labels(ids, labels, names_given=names_given)
    if not sum(map(len, ordered.values())):
        return findings
    text = list(columns.text)
    survey = survey_texts(ordered, text)
    near = find_near(survey, len(ordered.get("train", ())) * len(text))
    findings += find_overlaps(ordered, survey, near, labels, ids)
    samples = {s: sample_rows(part, _names(part, columns), MOST_ROWS) for s, part in ordered.items() if len(part)}
    if "train" in samples:
        findings += _giveaways(samples["train"], survey, ids["train"], labels, columns)
    for split, sample in samples.items():
        if split != "train" and "train" in samples and len(ids[split]) >= FEWEST_DRIFT_ROWS:
            lengths = [survey.of(one, survey.characters).sum(axis=1) for one in ("train", split)]
            findings += _compare_labels(split, ids["train"], ids[split], labels)
            findings += _compare_lengths(split, *lengths)
            findings += _compare_words(split, samples["train"].joined(text), sample.joined(text))
    return sort_findings(findings)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Most serious first."""
    return sorted(findings, key=lambda finding: RANKS[finding.severity])


def require_clean(findings: Sequence[Finding], *, strict: bool) -> None:
    """A DataError that lists every warning, where data without any is asked for."""
    bad = [finding for finding in findings if finding.severity != "info"]
    if strict and bad:
        listed = "".join(f"\n  {finding.code}: {finding.evidence}" for finding in bad)
        problem = f"the audit has {len(bad)} warning{'s' * (len(bad) > 1)}, and --strict_data is set:{listed}"
        raise DataError(problem, fix="Correct the data, or omit --strict_data")


def _names(part: Part, columns: Columns) -> list[str]:
    others = [name for name in part.source.column_names if name not in (*columns.text, columns.label, "labels")]
    return [*columns.text, *others[:20]]


def _giveaways(sample: RowSample, survey: TextSurvey, ids: Ints, labels: LabelMap, columns: Columns) -> list[Finding]:
    keys = survey.of("train", survey.keys)
    ordered, wanted = np.sort(keys, axis=None), keys[sample.rows]  # one copy, not the four of np.unique's inverse
    often = np.searchsorted(ordered, wanted, "right") - np.searchsorted(ordered, wanted, "left")
    del ordered
    size = survey.of("train", survey.characters)[sample.rows]
    features = text_features(sample, columns.text, size, often, len(keys))
    return find_giveaways(sample, features, keys[sample.rows].sum(axis=1), ids[sample.rows], labels, columns.text)


DRIFT_ROWS = 3_000
FEWEST_DRIFT_ROWS = 30
LABEL_DISTANCE = 0.1
LENGTH_DISTANCE = 0.2
WORDS_AUC = 0.6
"""From which a classifier that tells the splits apart by their words is worth a line, and a warning."""


def _compare_labels(split: str, train: Ints, other: Ints, labels: LabelMap) -> list[Finding]:
    """Shares of labels (total variation) or the distribution of numbers (Kolmogorov-Smirnov)."""
    if labels.task is Task.MULTILABEL:
        return []
    if labels.task is Task.REGRESSION:
        one, two = train[np.isfinite(train)], other[np.isfinite(other)]
        distance = _ks(one, two)
        noise = _ks_noise(len(one), len(two))
        what = f"The label distribution differs between train and {split}"
    else:
        one, two = train[train >= 0], other[other >= 0]
        if not len(one) or not len(two):
            return []
        shares = [np.bincount(ids, minlength=len(labels)) / len(ids) for ids in (one, two)]
        distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
        noise = float(np.sqrt(shares[0] * (1 - shares[0]) * (1 / len(one) + 1 / len(two))).sum() / 2 * 2)
        top = int(np.abs(shares[0] - shares[1]).argmax())
        of_train, of_split = f"{shares[0][top]:.1%} of train", f"{shares[1][top]:.1%} of {split}"
        what = f"The label distribution differs: {labels.names[top]!r} is {of_train} and {of_split}"
    if distance < max(LABEL_DISTANCE, 2 * noise):
        return []
    evidence = f"{what} (distance {distance:.2f}; {noise:.2f} expected by chance)."
    advice = (f"Draw {split} from the same rows as train, or choose by a metric that does not depend on the shares.",)
    return [Finding("label_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})]


def _compare_lengths(split: str, train: Ints, other: Ints) -> list[Finding]:
    """Characters a row."""
    distance, noise = _ks(train, other), _ks_noise(len(train), len(other))
    if distance < max(LENGTH_DISTANCE, 2 * noise):
        return []
    here, there = (" to ".join(f"{at:,.0f}" for at in np.quantile(some, (0.25, 0.75))) for some in (other, train))
    middle = f"the middle half has {there} characters in train, {here} in {split}"
    evidence = f"Text lengths differ between train and {split}: {middle}."
    advice = (f"Check that {split} and train are the same kind of text.",)
    return [Finding("length_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})]


def _compare_words(split: str, train: Sequence[str], other: Sequence[str]) -> list[Finding]:
    """Whether a linear classifier tells the splits apart, out of fold (area under the ROC curve)."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import RidgeClassifier
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    count = min(len(train), len(other), DRIFT_ROWS)
    if count < 100:
        return []
    texts = [t for some in (train, other) for t in _spread(some, count)]
    target = np.repeat([0, 1], count)
    words = HashingVectorizer(n_features=2**16, alternate_sign=False, dtype=np.float32).transform(texts)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    linear = RidgeClassifier(solver="sparse_cg", tol=1e-2)
    area = float(roc_auc_score(target, cross_val_predict(linear, words, target, cv=folds, method="decision_function")))
    noise = 1.5 / np.sqrt(12 * count / 2)
    if area < max(WORDS_AUC, 0.5 + 3 * noise):
        return []
    evidence = f"A linear classifier distinguishes {split} texts from train texts by their words (ROC AUC {area:.2f})."
    advice = (f"If new data will be like {split}, its score is the right one; if not, draw {split} from train.",)
    return [Finding("text_drift", "info", evidence, advice, numbers={"split": split, "auc": area})]


def _spread(texts: Sequence[str], count: int) -> list[str]:
    return [texts[at] for at in np.linspace(0, len(texts) - 1, count).round().astype(int)]


def _ks(one: Ints, two: Ints) -> float:
    if not len(one) or not len(two):
        return 0.0
    one, two = np.sort(one), np.sort(two)
    every = np.concatenate([one, two])
    gap = np.searchsorted(one, every, "right") / len(one) - np.searchsorted(two, every, "right") / len(two)
    return float(np.abs(gap).max())


def _ks_noise(one: int, two: int) -> float:
    """The distance that two samples of one distribution exceed once in a thousand times."""
    return 1.95 * float(np.sqrt((one + two) / max(one * two, 1)))


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
    evidence = f"Constant baseline: {name!r} is the label of {accuracy:.1%} of the {total:,} labeled {split} rows."
    advice = ("A useful model is above that accuracy.",)
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
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
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
    findings.append(_markers(sample, ids, labels, text))
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The number of unique classes")  # many classes are fine here
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
    form = "{:.2f}" if regression else "{:.1%}"
    words = ", ".join(f"{one.name} {form.format(one.score)}" for one in sorted(shown, key=lambda one: -one.score))
    floor = "" if regression else f" (the most frequent label: {shown[0].constant:.1%})"
    unit = "R2" if regression else "accuracy"
    evidence = f"Decision trees that ignore the words reach this cross-validated {unit}: {words}{floor}."
    numbers = {one.name: one.score for one in found} | {"constant": shown[0].constant}
    advice = ("A model that reads the text must be clearly above that.",)
    return Finding("content_free_baseline", "info", evidence, advice, numbers=numbers)


def _giveaway(one: ContentFree, *, regression: bool) -> Finding | None:
    if one.gone < LARGE_SHARE:
        return None
    numbers = {"feature": one.name, "score": one.score, "constant": one.constant}
    if one.name == PLACE:
        evidence = f"The file is sorted by label: the row number predicts {one.score:.1%} of the labels."
        advice = ("Shuffle the file before you split it by hand.",)
        return Finding("sorted_by_label", "info", evidence, advice, numbers=numbers)
    says = f"R2 {one.score:.2f}" if regression else f"{one.score:.1%} of the labels"
    evidence = f"{one.name[0].upper()}{one.name[1:]} predicts {says} without reading the text."
    advice = ("Check how the rows were made: a model learns this instead of the text, and new rows may not have it.",)
    return Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)


def _column(name: str, one: ContentFree, cells: Sequence[Any], labels: int, *, regression: bool) -> Finding | None:
    if one.gone < 0.8:
        return None
    numbers = {"column": name, "score": one.score, "constant": one.constant}
    says = f"R2 {one.score:.2f}" if regression else f"{one.score:.1%} of the labels"
    if len({str(cell) for cell in cells}) <= max(2 * labels, 10):
        evidence = f"Column {name!r} repeats the label ({says}). The model does not use this column."
        return Finding("column_repeats_label", "info", evidence, numbers=numbers)
    evidence = (
        f"Column {name!r} predicts {says}: ids or dates correlate with the label. The model does not use this column."
    )
    advice = (
        "Check how the rows were collected: labels that follow ids or dates often differ in source, not in meaning.",
    )
    return Finding("label_giveaway", "warning", evidence, advice, numbers=numbers)


MARKER_SHARE, MARKER_ELSEWHERE = 0.95, 0.02
MOST_MARKED = 100
"""Classes; with more, no word is searched for."""


def _markers(sample: RowSample, ids: Ints, labels: LabelMap, text: Sequence[str]) -> Finding | None:
    """Find words such as [POS] that nearly all rows of a class have and hardly any other row, for all classes but one."""
    if labels.task is Task.REGRESSION or len(labels) > MOST_MARKED:
        return None
    counts: dict[int, Counter[str]] = {}
    joined = [" ".join(str(sample.columns[name][row])[:2_000] for name in text) for row in range(len(ids))]
    for label, words in zip(ids.tolist(), joined, strict=True):
        if label >= 0:
            counts.setdefault(label, Counter()).update(set(_WORD.findall(words)))
    rows = {label: int((ids == label).sum()) for label in counts}
    every = sum(counts.values(), Counter())
    found: dict[int, str] = {}
    for label, own in counts.items():
        least, most = MARKER_SHARE * rows[label], MARKER_ELSEWHERE * (sum(rows.values()) - rows[label])
        marks = [word for word, count in own.items() if count >= least and every[word] - count <= most]
        if marks:
            found[label] = min(marks, key=lambda word: (every[word] - own[word], -own[word], word))
    if len(found) < max(1, len(counts) - 1):
        return None
    shown = first_few([f"{word!r} for {labels.names[label]!r}" for label, word in found.items()], SHOWN)
    evidence = f"The text contains the label: a single word identifies it in at least {MARKER_SHARE:.0%} of the rows ({shown})."
    advice = ("Remove the word if it was added with the label: the model learns it instead of the text.",)
    numbers = {"feature": "marker words", "words": {labels.names[label]: word for label, word in found.items()}}
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
        found = _DIGITS.findall(str(cell)[:2_000])
        if found:
            dated = bool(DATE.search(str(cell)[:2_000]))
            values[at] = (float(found[0][:15]), float(found[-1][:15]), len("".join(found)), dated)
    return values


def column_features(cells: Sequence[Any]) -> Ints:
    """First and last number of each cell, all of its digits as one, and a code for the words around them."""
    texts = ["" if cell is None else str(cell) for cell in cells]
    numbers = [_DIGITS.findall(text) or ["-1"] for text in texts]
    ends = [np.array([float(found[at][:15]) for found in numbers]) for at in (0, -1)]
    digits = np.array([float("".join(found)[:15].replace(".", "")) for found in numbers])
    words = [re.sub(r"\d+", "", text) for text in texts]
    codes = {word: code for code, word in enumerate(dict.fromkeys(words))}
    code = np.array([codes[word] for word in words], dtype=np.float64)
    return np.stack([*ends, digits, code if len(codes) <= len(cells) // 4 else np.zeros(len(cells))], axis=1)


LEAK_SHARE = 0.01
"""Share of the rows of a split that are in train, equal or nearly so, from which its score is too good to be trusted."""
REPEAT_SHARE = 0.2
CONTRADICTION_SHARE = 0.005
CONSTANT_SHARE = 0.05
CLOSE_SHARE = 0.2
"""Share of the rows of a split that are close to a train row and have its label, from which this is worth a warning."""
SHOWN_ROWS = 10


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
            findings += _leaks((split, parts[split]), exact, like, rows["train"], agree=same, complete=near.complete)
        findings += _repeats((split, parts[split]), exact, like, complete=near.complete)
        findings += _swaps(split, exact)
        findings += _constant((split, parts[split]), exact, survey.of(split, survey.characters))
    if near.least >= CLOSE + 10 and "train" in rows:
        close = near_roots(near.earlier(CLOSE), equal)
        findings += _close_by_nature(near, {split: survey.of(split, close) for split in parts}, ids, labels)
    return findings + _contradictions(parts, {split: found[0] for split, found in rows.items()}, ids, labels)


def _close_by_nature(
    near: NearTexts, rows: Mapping[str, Ints], ids: Mapping[str, Ints], labels: LabelMap
) -> list[Finding]:
    """Where nearness alone is no sign of a copy: rows of a template, one word changed, made from each other."""
    least = "" if near.complete else "At least "
    evidence = (
        f"{least}{near.by_nature:.0%} of the train texts resemble each other, as if generated from templates. The near-duplicate "
        f"threshold was raised from {CLOSE}% to {near.least}% similarity."
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
            evidence += f" {share:.0%} of the {split} rows resemble a train row, mostly with the same label."
    advice = ("If rows were generated from each other, keep all rows of one source on one side of the split.",)
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
    where: Split, exact: Ints, like: Ints, in_train: tuple[Ints, Ints], *, agree: bool, complete: bool
) -> list[Finding]:
    (split, part), (train, train_like) = where, in_train
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
        "first": _first(part, whole | nearly),
    }
    findings = []
    if count:
        least, so = "" if complete else "at least ", " or nearly so" if nearly.any() else ""
        evidence = (
            f"{least}{count:,} of {len(exact):,} {split} rows are in train{so}: {int(whole.sum()):,} equal, "
            f"{int(nearly.sum()):,} nearly equal (first: {_shown(part, whole | nearly)})."
        )
        steps = [f"Remove them from train or from {split}: the {split} score is too optimistic."]
        if not whole.any():
            steps.append("If rows are made from templates, keep all rows of one template on one side.")
        serious = count if agree else int(whole.sum())
        if not agree:
            evidence += " Near-duplicates agree in their label only as often as by chance."
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


def _repeats(where: Split, exact: Ints, like: Ints, *, complete: bool) -> list[Finding]:
    repeated = _again(exact)
    near = _again(like) & ~repeated
    many = repeated.sum() >= REPEAT_SHARE * len(repeated) and len(repeated) >= 20
    least = "" if complete else "At least "
    advice = "Remove the repeats unless {}: they weigh more than other rows."
    what, meant = "repeat the text of an earlier row", advice.format("they are meant")
    found = [_of_rows("duplicate_rows", "warning" if many else "info", where, repeated, what, meant)]
    what, meant = "nearly repeat the text of an earlier row", advice.format("the rows come from a template")
    found.append(_of_rows("near_duplicate_rows", "info", where, near, what, meant, least))
    return [finding for finding in found if finding.numbers["rows"]]


Split = tuple[str, Part]
"""The name of a split and its rows."""


def _of_rows(
    code: str, severity: Severity, where: Split, rows: Ints, what: str, advice: str, least: str = ""
) -> Finding:
    """Return a finding about the rows of a split for which `rows` is true."""
    split, part = where
    numbers = {"split": split, "rows": int(rows.sum()), "of": len(rows), "first": _first(part, rows)}
    evidence = f"{least}{numbers['rows']:,} of {len(rows):,} {split} rows {what} (first: {_shown(part, rows)})."
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


def _constant(where: Split, rows: Ints, characters: Ints) -> list[Finding]:
    """Texts that are empty, and one text in a large share of the rows of its column."""
    findings = []
    empty = (characters == 0).any(axis=1)
    if empty.any():
        advice = "Fill them in or remove them: a model can only guess there."
        findings.append(_of_rows("empty_text", "warning", where, empty, "have an empty text", advice))
    for column in range(rows.shape[1]):
        texts, counts = np.unique(rows[:, column], return_counts=True)
        top = int(counts.max(initial=0))
        if top >= max(20, CONSTANT_SHARE * len(rows)):
            same = rows[:, column] == texts[counts.argmax()]
            what = "have one and the same text" + ("" if rows.shape[1] == 1 else f" as text {column + 1}")
            advice = "Check that the text column is the right one, and whether this text is a placeholder."
            severity: Severity = "warning" if rows.shape[1] == 1 or top == len(rows) else "info"
            findings.append(_of_rows("constant_text", severity, where, same, what, advice))
    return findings


def _contradictions(
    parts: Mapping[str, Part], rows: Mapping[str, Ints], ids: Mapping[str, Ints], labels: LabelMap
) -> list[Finding]:
    """Rows with the same text and another label (other labels, a number far away), in all labeled rows together."""
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
            findings.append(_of_rows("contradicting_labels", severity, (split, parts[split]), here, text, advice))
    return findings


def row_keys(rows: Ints) -> Ints:
    """One number for each row; text numbers fit 31 bits, so two of them fit one int64."""
    if rows.shape[1] == 1:
        return rows[:, 0]
    wide = rows.astype(np.int64)
    keys: Ints = (wide[:, 0] << 31) | wide[:, 1]
    return keys


def _first(part: Part, rows: Ints) -> list[str]:
    """Return the places in the file of the first rows for which `rows` is true."""
    return [part.where(row) for row in np.flatnonzero(rows)[:SHOWN_ROWS]]


def _shown(part: Part, rows: Ints) -> str:
    return ", ".join(_first(part, rows)[:3])


MOST_TOKENIZED = 3_000
UNKNOWN_SHARE = 0.01
CUT_SHARE = 0.1
SCRIPT_SHARE = 0.02
PIECES_A_LETTER = 0.85
"""Tokens a letter from which a tokenizer spells a script instead of reading it."""
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "Greek": ((0x370, 0x3FF),),
    "Cyrillic": ((0x400, 0x52F),),
    "Hebrew": ((0x590, 0x5FF),),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F)),
    "Devanagari": ((0x900, 0x97F),),
    "Thai": ((0xE00, 0xE7F),),
    "Hangul": ((0x1100, 0x11FF), (0xAC00, 0xD7AF)),
    "Kana": ((0x3040, 0x30FF),),
    "Han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF)),
}
WHOLE_CHARACTERS = ("Han", "Kana", "Hangul")
"""Scripts in which one character is a fair token."""
PIECES_A_CHARACTER = 1.6
"""Of these scripts: a tokenizer that takes each character to bytes gives two or three."""
PIECES_A_WORD, OF_LONG_WORDS = 1.9, 2.1
"""Tokens a word, as white space parts them, from which a tokenizer was made for another language: those of two English models
make 1.2 to 1.3 of English, 2.0 of French, 2.2 of Dutch and 2.3 of German."""
LONG_WORDS = ("German", "Dutch")
COMMON_WORDS = {
    "English": "the and of is was that with for are this from they have which",
    "German": "der die und das ist nicht mit ein eine von auf dem den sich auch",
    "French": "les des est une dans que pour qui sur pas avec au sont nous",
    "Spanish": "los las una que por con para del como pero más está son el",
    "Italian": "che di della per non sono gli nel alla con anche più questo",
    "Portuguese": "que não uma para com os das dos mais como foi pelo ele",
    "Dutch": "het een van en dat niet zijn voor met ook maar wordt deze",
}


def check_tokens(texts: Mapping[str, Sequence[str]], tokenizer: Any) -> list[Finding]:
    """Findings about a sample of the texts of each split; one split is enough to raise one."""
    every = [text for some in texts.values() for text in spread(some, MOST_TOKENIZED)]
    if not every:
        return []
    ids = tokenizer(every, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    counts = np.array([len(row) for row in ids])
    unknown = np.zeros(len(ids), np.int64)
    if tokenizer.unk_token_id is not None:
        unknown = np.array([row.count(tokenizer.unk_token_id) for row in ids])
    letters = count_letters(every)
    return [
        *_unknown(counts, unknown, every, tokenizer),
        *_scripts(letters, counts, unknown),
        *_languages(every, counts),
    ]


def check_cut(
    rows: int, cut: int, tokens: int, lost: int, longest: int, limit: int | None, length: int
) -> list[Finding]:
    """`longest`: tokens of which 99% of the rows have no more; `limit`: what the model can take."""
    share, words = cut / max(rows, 1), lost / max(tokens, 1)
    if not cut:
        return []
    evidence = f"{cut:,} of {rows:,} rows are longer than {length} tokens and are truncated; {words:.1%} of all tokens are lost."
    numbers = {"rows": cut, "share": share, "tokens_lost": words, "length": length}
    if limit is None or length < limit:
        upto = longest if limit is None else min(longest, limit)
        why = "99% of the rows fit then" if upto == longest else "the model supports that many"
        advice = f"Raise --max_seq_length to {upto}: {why}."
    else:
        advice = f"The model supports at most {limit}; --long_texts sets which part of a longer row it sees."
    severity: Severity = "warning" if share >= CUT_SHARE and words >= CUT_SHARE else "info"
    return [Finding("cut_rows", severity, evidence, (advice,), numbers=numbers)]


def spread(texts: Sequence[str], most: int) -> list[str]:
    """Some of the texts, from the whole length of the list."""
    if not texts:
        return []
    places = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), most)).round().astype(int))
    return [texts[at] for at in places]


def count_letters(texts: Sequence[str]) -> Ints:
    """(rows, scripts): letters of each script."""
    starts = [text[:2_000] for text in texts]
    points = np.frombuffer("".join(starts).encode("utf-32-le", "replace"), np.uint32)
    rows = np.repeat(np.arange(len(texts)), [len(start) for start in starts])
    found = np.zeros((len(texts), len(SCRIPTS)), np.int64)
    for at, ranges in enumerate(SCRIPTS.values()):
        inside = np.any([(points >= low) & (points <= high) for low, high in ranges], axis=0)
        found[:, at] = np.bincount(rows[inside], minlength=len(texts))
    return found


def _unknown(counts: Ints, unknown: Ints, texts: Sequence[str], tokenizer: Any) -> list[Finding]:
    share = float(unknown.sum() / max(counts.sum(), 1))
    lost = float((unknown * 2 > counts).mean())
    if share < UNKNOWN_SHARE and lost < UNKNOWN_SHARE:
        return []
    words = Counter(word for at in np.flatnonzero(unknown)[:200] for word in texts[at].split())
    ids = tokenizer(list(words), add_special_tokens=False, verbose=False)["input_ids"]
    lacking = [word for word, found in zip(words, ids, strict=True) if tokenizer.unk_token_id in found]
    shown = ", ".join(repr(word[:20]) for word in sorted(lacking, key=lambda word: -words[word])[:5])
    evidence = f"{share:.1%} of the tokens are unknown to the tokenizer, and {lost:.1%} of the rows mostly so: {shown}."
    advice = ("Use a model whose tokenizer knows this text, such as a multilingual one.",)
    return [Finding("unknown_tokens", "warning", evidence, advice, numbers={"share": share, "rows": lost})]


def _scripts(letters: Ints, counts: Ints, unknown: Ints) -> list[Finding]:
    names = list(SCRIPTS)
    some = letters.sum(axis=1) > 0
    main = np.where(some, letters.argmax(axis=1), -1)
    shares = {name: float((main == at).mean()) for at, name in enumerate(names) if (main == at).mean() >= SCRIPT_SHARE}
    findings = []
    for name in shares:
        rows = main == names.index(name)
        pieces = float(counts[rows].sum() / max(letters[rows].sum(), 1))
        most = PIECES_A_CHARACTER if name in WHOLE_CHARACTERS else PIECES_A_LETTER
        if name == "Latin" or pieces < most or unknown[rows].any():
            continue
        evidence = f"{shares[name]:.1%} of the rows are {name}, which the tokenizer spells out ({pieces:.1f} tokens per letter)."
        advice = ("Use a model that was trained on this script: this one cannot read it.",)
        findings.append(
            Finding("unreadable_script", "warning", evidence, advice, numbers={"script": name, "pieces": pieces})
        )
    if len(shares) > 1 and not set(shares) <= set(WHOLE_CHARACTERS):
        words = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        evidence = f"The texts are written in several scripts: {words} of the rows."
        advice = ("Check that the model knows all of them, and look at the scores of each.",)
        findings.append(Finding("mixed_scripts", "info", evidence, advice, numbers=shares))
    return findings


def _languages(texts: Sequence[str], tokens: Ints) -> list[Finding]:
    """Rows by the language of their common words; only rows that are clear count. `tokens`: how many each row has."""
    common = {name: set(words.split()) for name, words in COMMON_WORDS.items()}
    rows: dict[str, list[int]] = {name: [] for name in common}
    for row, text in enumerate(texts):
        spoken = text[:500].lower().split()
        hits = sorted(((sum(w in known for w in spoken), name) for name, known in common.items()), reverse=True)
        if hits[0][0] >= 2 and hits[0][0] >= 2 * hits[1][0]:
            rows[hits[0][1]].append(row)
    clear = sum(map(len, rows.values()))
    shares = {name: len(some) / clear for name, some in rows.items() if clear >= 50 and len(some) >= 0.05 * clear}
    findings = []
    for name in shares:
        pieces = float(tokens[rows[name]].sum() / max(sum(len(texts[row].split()) for row in rows[name]), 1))
        if name != "English" and pieces >= (OF_LONG_WORDS if name in LONG_WORDS else PIECES_A_WORD):
            evidence = (
                f"{shares[name]:.0%} of the rows are {name}, of which the tokenizer makes {pieces:.1f} tokens per word."
            )
            advice = (
                f"Use a model that was trained on {name}, or a multilingual one: this one knows few of its words.",
            )
            numbers = {"language": name, "share": shares[name], "pieces": pieces}
            findings.append(Finding("foreign_language", "warning", evidence, advice, numbers=numbers))
    if len(shares) > 1:
        words = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        evidence = f"The texts are in several languages: {words} of the rows whose language is clear."
        advice = ("Use a multilingual model, or train one model per language; look at the scores of each.",)
        findings.append(Finding("mixed_languages", "info", evidence, advice, numbers=shares))
    return findings
