"""The metrics of a task: `make_suite` picks them, a `Suite` computes them, at once or batch by batch like `evaluate`.

Keys follow `evaluate` and its glue metric: accuracy, f1, matthews_correlation, pearson, spearmanr. `f1`, `precision` and
`recall` are those of label 1 and exist for binary tasks only; over classes the names are f1_macro, f1_micro, f1_weighted,
precision_macro, recall_macro (macro_f1, mcc, roc_auc, spearman ... are understood and reported under the name here).
Predictions are ids (n,), or scores (n, classes) of which the largest wins; auroc, average_precision and log_loss need scores.
Rows labelled -1 (or -100, or NaN) are left out. What the rows do not define (one class only, no row, a NaN score) is None.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.metrics.names import DEFAULTS, canonical_name, metric_names, metric_of, resolve_glue
from tunesmith.metrics.rows import Array, Rows, Scale, make_rows, to_numpy
from tunesmith.metrics.uncertainty import Score

OF_ONE_CLASS = ("f1", "precision", "recall", "average_precision")
"""Metrics of two classes that are about label 1 alone."""

logger = logging.getLogger(__name__)


class Suite:
    """Named metrics of one task. `names` is the order they are reported in."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        *,
        scores: Scale = "logits",
        positive_name: str | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.task = task
        self.metrics = {metric.name: metric for metric in (metric_of(name, task) for name in names)}
        self.names = tuple(self.metrics)
        self.positive_name = positive_name if task is Task.BINARY else None
        self.scores = scores
        self.thresholds = thresholds
        self._predictions: list[Array] = []
        self._references: list[Array] = []

    @property
    def metric_for_best_model(self) -> str:
        """The metric a run is judged by unless told otherwise: the first one."""
        return self.names[0]

    def greater_is_better(self, name: str) -> bool:
        """Whether more is better; `loss` and any alias or `eval_` prefix are understood. Unknown names are a ConfigError."""
        plain = canonical_name(name)
        return plain != "loss" and metric_of(plain, self.task).greater_is_better

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float | None]:
        """Metric -> value, over what was added and what is given here; forgets the added rows, as `evaluate` does."""
        rows = self._take(predictions, references)
        return {name: metric.measure(rows) for name, metric in self.metrics.items()}

    def compute_with_intervals(
        self,
        predictions: Any = None,
        references: Any = None,
        *,
        decisions: Any = None,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> dict[str, Score]:
        """Metric -> value with n and interval, over the same rows as `compute`; `decisions` as in `make_rows`."""
        rows = self._take(predictions, references)
        rows = rows if decisions is None else replace(rows, decisions=to_numpy(decisions))
        found = {name: metric.score(rows, confidence=confidence, seed=seed) for name, metric in self.metrics.items()}
        return {k: replace(v, of=self.positive_name) if k in OF_ONE_CLASS else v for k, v in found.items()}

    def add(self, prediction: Any = None, reference: Any = None) -> None:
        """Remember one row."""
        self.add_batch(predictions=to_numpy(prediction)[None], references=to_numpy(reference)[None])

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Remember rows. Shapes that do not fit are refused here, not at the end."""
        batch, expected = to_numpy(predictions), to_numpy(references)
        make_rows(batch, expected, task=self.task, scores=self.scores, thresholds=self.thresholds)
        if len(batch):
            self._predictions.append(batch)
            self._references.append(expected)

    def reset(self) -> None:
        """Forget the rows added so far."""
        self._predictions, self._references = [], []

    def _take(self, predictions: Any, references: Any) -> Rows:
        if (predictions is None) != (references is None):
            raise ConfigError("predictions and references go together", where="compute", fix="Give both or neither.")
        if predictions is not None and not self._predictions:
            rows = make_rows(predictions, references, task=self.task, scores=self.scores, thresholds=self.thresholds)
        else:
            if predictions is not None:
                self.add_batch(predictions=predictions, references=references)
            empty = [np.zeros(0)]
            joined = np.concatenate(self._predictions or empty), np.concatenate(self._references or empty)
            self.reset()
            rows = make_rows(*joined, task=self.task, scores=self.scores, thresholds=self.thresholds)
        if not rows.sound:
            logger.warning("some of %d predictions are not finite: every metric is undefined", len(rows))
        return rows


def make_suite(
    task: Task,
    *,
    names: Sequence[str] | None = None,
    glue_task: str | None = None,
    scores: Scale = "logits",
    positive_name: str | None = None,
    thresholds: Sequence[float] | None = None,
) -> Suite:
    """The metrics of a task: `names` if given, else those of the GLUE task, else the usual ones. First = the one to judge by.

    `positive_name` is what label 1 is called: scores of that class alone carry the name. `thresholds` as in a LabelMap.
    """
    chosen: Sequence[str] = DEFAULTS[task]
    if glue_task is not None:
        expected, chosen = resolve_glue(glue_task)
        if (expected is Task.REGRESSION) != (task is Task.REGRESSION) or task is Task.MULTILABEL:
            raise ConfigError(
                f"GLUE {glue_task} is a {expected.value} task, the data is {task.value}", fix="Check the label column."
            )
    if names:
        chosen = names
    return Suite(task, chosen, scores=scores, positive_name=positive_name, thresholds=thresholds)


def load(path: str, config_name: str | None = None) -> Suite:
    """`load("glue", "mrpc")` or `load("f1")`, as `evaluate.load`, without the network."""
    if path == "glue":
        if config_name is None:
            raise ConfigError("the glue metric needs the name of its task", fix='For example load("glue", "mrpc").')
        task, names = resolve_glue(config_name)
        return Suite(task, names)
    name = canonical_name(path)
    order = (Task.MULTICLASS, Task.BINARY, Task.REGRESSION, Task.MULTILABEL)
    task = next((t for t in order if name in metric_names(t)), Task.BINARY)
    return Suite(task, (name,))
