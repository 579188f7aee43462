"""Measure classifiers that only count shared words on sentence pairs: the baseline for the sample data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

FEATURES = ("jaccard", "containment", "length difference", "bigram overlap", "content jaccard", "number mismatch")
# Frequent function words, excluded from the overlap.
STOP = frozenset(
    re.findall(
        r"\w+",
        "a an the of in on at to for from by with and or but as is are was were be been has have had it its he she his "
        "her they their them that this which who will would do does did than then so if when while after before not no",
    )
)

Pair = tuple[str, str]
Split = tuple[np.ndarray, np.ndarray]  # features, targets


def split_words(text: str) -> list[str]:
    """Return the words and numbers of a sentence in lower case."""
    return re.findall(r"[\w']+", text.lower())


def _share(left: set[Any], right: set[Any]) -> tuple[float, float]:
    both = len(left & right)
    return both / max(1, len(left | right)), both / max(1, min(len(left), len(right)))


def overlap_features(pairs: Sequence[Pair], *, with_numbers: bool = False) -> np.ndarray:
    """Return one row per pair: the first five FEATURES, and optionally the sixth (digits differ)."""
    rows = []
    for first, second in pairs:
        a, b = split_words(first), split_words(second)
        jaccard, containment = _share(set(a), set(b))
        bigrams, _ = _share(set(pairwise(a)), set(pairwise(b)))
        content, _ = _share(set(a) - STOP, set(b) - STOP)
        digits = {w for w in a if w.isdigit()} != {w for w in b if w.isdigit()}
        rows.append([jaccard, containment, abs(len(a) - len(b)) / max(len(a), len(b)), bigrams, content, float(digits)])
    return np.asarray(rows)[:, : 6 if with_numbers else 5]


def best_threshold(train: Split, test: Split) -> tuple[float, int, float]:
    """Return test accuracy, feature and threshold of the single-feature rule (either direction) that is best on train."""
    (x, y), (x_test, y_test) = train, test
    best = (0.0, 0, 0.0, True)
    for feature in range(x.shape[1]):
        for cut in np.unique(x[:, feature]):
            hit = float(((x[:, feature] >= cut) == y).mean())
            for accuracy, up in ((hit, True), (1 - hit, False)):
                if accuracy > best[0]:
                    best = (accuracy, feature, float(cut), up)
    _, feature, cut, up = best
    guess = (x_test[:, feature] >= cut) == up
    return float((guess == y_test).mean()), feature, cut


def logistic_accuracy(train: Split, test: Split) -> float:
    """Return the test accuracy of logistic regression on standardized features and their products."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(
        StandardScaler(), PolynomialFeatures(2, include_bias=False), LogisticRegression(max_iter=2000)
    )
    model.fit(*train)
    return float(model.score(*test))
