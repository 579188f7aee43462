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
from typing import Any

import numpy as np

from tunesmith.errors import ConfigError
from tunesmith.labels import Task
from tunesmith.metrics.names import DEFAULTS, METRICS, canonical_name, resolve_glue, resolve_names
from tunesmith.metrics.rows import Array, Rows, Scale, make_rows, to_numpy
from tunesmith.metrics.scores import counts_of, score_of, value_of
from tunesmith.metrics.uncertainty import Score

logger = logging.getLogger(__name__)


class Suite:
    """Named metrics of one task. `names` is the order they are reported in."""

    def __init__(self, task: Task, names: Sequence[str], *, scores: Scale = "logits") -> None:
        self.task = task
        self.names = resolve_names(names, task)
        self.scores = scores
        self._predictions: list[Array] = []
        self._references: list[Array] = []

    @property
    def metric_for_best_model(self) -> str:
        """The metric a run is judged by unless told otherwise: the first one."""
        return self.names[0]

    def greater_is_better(self, name: str) -> bool:
        """Whether more is better; `loss` and any alias or `eval_` prefix are understood. Unknown names are a ConfigError."""
        plain = canonical_name(name)
        return plain != "loss" and METRICS[resolve_names([plain], self.task)[0]].greater_is_better

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float | None]:
        """Metric -> value, over what was added and what is given here; forgets the added rows, as `evaluate` does."""
        rows = self._take(predictions, references)
        single = self.task in (Task.BINARY, Task.MULTICLASS)
        counts = counts_of(rows, self.task) if single and len(rows) else None
        return {name: value_of(name, rows, self.task, counts) for name in self.names}

    def compute_with_intervals(
        self, predictions: Any = None, references: Any = None, *, confidence: float = 0.95, seed: int = 0
    ) -> dict[str, Score]:
        """Metric -> value with n and interval, over the same rows as `compute`."""
        rows = self._take(predictions, references)
        return {name: score_of(name, rows, self.task, confidence=confidence, seed=seed) for name in self.names}

    def add(self, prediction: Any = None, reference: Any = None) -> None:
        """Remember one row."""
        self.add_batch(predictions=to_numpy(prediction)[None], references=to_numpy(reference)[None])

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Remember rows. Shapes that do not fit are refused here, not at the end."""
        batch, expected = to_numpy(predictions), to_numpy(references)
        make_rows(batch, expected, task=self.task, scores=self.scores)
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
            rows = make_rows(predictions, references, task=self.task, scores=self.scores)
        else:
            if predictions is not None:
                self.add_batch(predictions=predictions, references=references)
            empty = [np.zeros(0)]
            joined = np.concatenate(self._predictions or empty), np.concatenate(self._references or empty)
            self.reset()
            rows = make_rows(*joined, task=self.task, scores=self.scores)
        if not rows.sound:
            logger.warning("some of %d predictions are not finite: every metric is undefined", len(rows))
        return rows


def make_suite(
    task: Task, *, names: Sequence[str] | None = None, glue_task: str | None = None, scores: Scale = "logits"
) -> Suite:
    """The metrics of a task: `names` if given, else those of the GLUE task, else the usual ones. First = the one to judge by."""
    chosen: Sequence[str] = DEFAULTS[task]
    if glue_task is not None:
        expected, chosen = resolve_glue(glue_task)
        if (expected is Task.REGRESSION) != (task is Task.REGRESSION) or task is Task.MULTILABEL:
            raise ConfigError(
                f"GLUE {glue_task} is a {expected.value} task, the data is {task.value}", fix="Check the label column."
            )
    if names:
        chosen = names
    return Suite(task, chosen, scores=scores)


def load(path: str, config_name: str | None = None) -> Suite:
    """`load("glue", "mrpc")` or `load("f1")`, as `evaluate.load`, without the network."""
    if path == "glue":
        if config_name is None:
            raise ConfigError("the glue metric needs the name of its task", fix='For example load("glue", "mrpc").')
        task, names = resolve_glue(config_name)
        return Suite(task, names)
    name = canonical_name(path)
    order = (Task.MULTICLASS, Task.BINARY, Task.REGRESSION, Task.MULTILABEL)
    task = next((t for t in order if name in METRICS and t in METRICS[name].tasks), Task.BINARY)
    return Suite(task, (name,))
