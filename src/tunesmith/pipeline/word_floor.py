"""The floor of words: TF-IDF of words and word pairs with a linear model. Imports no torch: another process may fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.labels import Task

MOST_ROWS = 10_000
"""Training rows used: more would cost more than they teach a model of words."""


def word_scores(
    train: Sequence[str], labels: npt.NDArray[Any], others: Sequence[Sequence[str]], task: Task, classes: int
) -> list[npt.NDArray[np.float64]]:
    """Scores (rows, classes) of each list of other texts; for regression the value. Fitted on the training texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    known = np.flatnonzero(labels >= 0) if labels.dtype.kind == "i" else np.arange(len(labels))
    known = known[:MOST_ROWS]
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), max_features=200_000, token_pattern=r"(?u)\b\w+\b")
    try:
        table = words.fit_transform([train[int(i)] for i in known])
    except ValueError:  # not one word in any text
        return [np.zeros((len(texts), classes)) for texts in others]
    targets = labels[known] if labels.ndim == 2 or task is Task.REGRESSION else np.eye(classes)[labels[known]]
    fitted = Ridge(alpha=1.0, solver="sparse_cg", tol=1e-3).fit(table, np.asarray(targets, dtype=np.float64))
    found = []
    for texts in others:
        scores = fitted.predict(words.transform(texts)).reshape(len(texts), -1)
        # Half the way between no and yes is where a logit changes its sign.
        found.append(scores if task is Task.REGRESSION else 4.0 * (scores - 0.5))
    return found
