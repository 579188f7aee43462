"""Whether a split is drawn from the same rows as train: labels, lengths, words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tunesmith.audit.text_survey import Ints
from tunesmith.findings import Finding, Severity
from tunesmith.labels import LabelMap, Task

MOST_ROWS = 3_000
LABEL_DISTANCE = 0.1
LENGTH_DISTANCE = 0.2
WORDS_AUC = (0.6, 0.8)
"""From which a classifier that tells the splits apart by their words is worth a line, and a warning."""


def compare_labels(split: str, train: Ints, other: Ints, labels: LabelMap) -> Finding | None:
    """Shares of labels (total variation) or the distribution of numbers (Kolmogorov-Smirnov)."""
    if labels.task is Task.MULTILABEL:
        return None
    if labels.task is Task.REGRESSION:
        one, two = train[np.isfinite(train)], other[np.isfinite(other)]
        distance = _ks(one, two)
        noise = _ks_noise(len(one), len(two))
        what = "the numbers to predict are"
    else:
        one, two = train[train >= 0], other[other >= 0]
        if not len(one) or not len(two):
            return None
        shares = [np.bincount(ids, minlength=len(labels)) / len(ids) for ids in (one, two)]
        distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
        noise = float(np.sqrt(shares[0] * (1 - shares[0]) * (1 / len(one) + 1 / len(two))).sum() / 2 * 2)
        top = int(np.abs(shares[0] - shares[1]).argmax())
        what = f"{labels.names[top]!r} is {shares[0][top]:.1%} of train and {shares[1][top]:.1%} of {split}; labels are"
    if distance < max(LABEL_DISTANCE, 2 * noise):
        return None
    evidence = f"In {split}, {what} distributed otherwise than in train (distance {distance:.2f}, chance {noise:.2f})."
    advice = (f"Draw {split} from the same rows as train, or choose by a metric that does not depend on the shares.",)
    return Finding("label_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})


def compare_lengths(split: str, train: Ints, other: Ints) -> Finding | None:
    """Characters a row."""
    distance, noise = _ks(train, other), _ks_noise(len(train), len(other))
    if distance < max(LENGTH_DISTANCE, 2 * noise):
        return None
    here, there = (" to ".join(f"{at:,.0f}" for at in np.quantile(some, (0.25, 0.75))) for some in (other, train))
    evidence = (
        f"Texts of {split} have other lengths than those of train: the middle half have {here} characters, "
        f"in train {there}."
    )
    advice = (f"Check that {split} and train are the same kind of text.",)
    return Finding("length_drift", "warning", evidence, advice, numbers={"split": split, "distance": distance})


def compare_words(split: str, train: Sequence[str], other: Sequence[str]) -> Finding | None:
    """Whether a linear classifier tells the splits apart, out of fold (area under the ROC curve)."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import RidgeClassifier
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    count = min(len(train), len(other), MOST_ROWS)
    if count < 100:
        return None
    texts = [t for some in (train, other) for t in _spread(some, count)]
    target = np.repeat([0, 1], count)
    words = HashingVectorizer(n_features=2**16, alternate_sign=False, dtype=np.float32).transform(texts)
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    linear = RidgeClassifier(solver="sparse_cg", tol=1e-2)
    area = float(roc_auc_score(target, cross_val_predict(linear, words, target, cv=folds, method="decision_function")))
    noise = 1.5 / np.sqrt(12 * count / 2)
    if area < max(WORDS_AUC[0], 0.5 + 3 * noise):
        return None
    severity: Severity = "warning" if area >= WORDS_AUC[1] else "info"
    evidence = f"Texts of {split} can be told from those of train by their words (area under the ROC curve {area:.2f})."
    advice = (f"If new rows will be like {split}, that is the honest score; if not, draw {split} from train.",)
    return Finding("text_drift", severity, evidence, advice, numbers={"split": split, "auc": area})


def find_drift(
    ids: Mapping[str, Ints], lengths: Mapping[str, Ints], texts: Mapping[str, Sequence[str]], labels: LabelMap
) -> list[Finding]:
    """Every split against train."""
    found: list[Finding | None] = []
    for split in ids:
        if split == "train" or "train" not in ids or len(ids[split]) < 30:
            continue
        found.append(compare_labels(split, ids["train"], ids[split], labels))
        found.append(compare_lengths(split, lengths["train"], lengths[split]))
        found.append(compare_words(split, texts["train"], texts[split]))
    return [finding for finding in found if finding is not None]


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
