"""The audit of the rows of all splits: what can be found before a tokenizer or a model is loaded; and whether a split is
drawn from the same rows as train: labels, lengths, words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tunesmith.data.columns import Columns
from tunesmith.data.label_findings import MOST_ROWS, check_labels, find_giveaways, label_ids, text_features
from tunesmith.data.near_duplicates import find_near
from tunesmith.data.overlaps import find_overlaps
from tunesmith.data.source import Part
from tunesmith.data.text_survey import Ints, RowSample, TextSurvey, sample_rows, survey_texts
from tunesmith.errors import DataError
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
    with tempfile.TemporaryDirectory(prefix="tunesmith-audit-") as folder:
        survey = survey_texts(ordered, text, Path(folder))
        train_texts = len(ordered.get("train", ())) * len(text)
        near = find_near(survey, train_texts)
    survey.starts, survey.sizes = np.empty(0, np.int64), np.empty(0, np.int32)  # the scratch files are gone
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
        raise DataError(problem, fix="Correct the data, or leave --strict_data out")


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
WORDS_AUC = (0.6, 0.8)
"""From which a classifier that tells the splits apart by their words is worth a line, and a warning."""


def _compare_labels(split: str, train: Ints, other: Ints, labels: LabelMap) -> list[Finding]:
    """Shares of labels (total variation) or the distribution of numbers (Kolmogorov-Smirnov)."""
    if labels.task is Task.MULTILABEL:
        return []
    if labels.task is Task.REGRESSION:
        one, two = train[np.isfinite(train)], other[np.isfinite(other)]
        distance = _ks(one, two)
        noise = _ks_noise(len(one), len(two))
        what = "the numbers to predict are"
    else:
        one, two = train[train >= 0], other[other >= 0]
        if not len(one) or not len(two):
            return []
        shares = [np.bincount(ids, minlength=len(labels)) / len(ids) for ids in (one, two)]
        distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
        noise = float(np.sqrt(shares[0] * (1 - shares[0]) * (1 / len(one) + 1 / len(two))).sum() / 2 * 2)
        top = int(np.abs(shares[0] - shares[1]).argmax())
        what = f"{labels.names[top]!r} is {shares[0][top]:.1%} of train and {shares[1][top]:.1%} of {split}; labels are"
    if distance < max(LABEL_DISTANCE, 2 * noise):
        return []
    evidence = f"In {split}, {what} distributed otherwise than in train (distance {distance:.2f}, chance {noise:.2f})."
    advice = (f"Draw {split} from the same rows as train, or choose by a metric that does not depend on the shares.",)
    return [Finding("label_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})]


def _compare_lengths(split: str, train: Ints, other: Ints) -> list[Finding]:
    """Characters a row."""
    distance, noise = _ks(train, other), _ks_noise(len(train), len(other))
    if distance < max(LENGTH_DISTANCE, 2 * noise):
        return []
    here, there = (" to ".join(f"{at:,.0f}" for at in np.quantile(some, (0.25, 0.75))) for some in (other, train))
    evidence = (
        f"Texts of {split} have other lengths than those of train: the middle half have {here} characters, "
        f"in train {there}."
    )
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
    if area < max(WORDS_AUC[0], 0.5 + 3 * noise):
        return []
    severity: Severity = "warning" if area >= WORDS_AUC[1] else "info"
    evidence = f"Texts of {split} can be told from those of train by their words (area under the ROC curve {area:.2f})."
    advice = (f"If new rows will be like {split}, that is the honest score; if not, draw {split} from train.",)
    return [Finding("text_drift", severity, evidence, advice, numbers={"split": split, "auc": area})]


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
