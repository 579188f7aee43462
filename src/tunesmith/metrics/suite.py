"""The metrics of a task: their names, `make_suite` that picks them, and a `Suite` that computes them, at once or batch by batch
like `evaluate`.

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

from tunesmith.errors import ConfigError, nearest
from tunesmith.labels import Task
from tunesmith.metrics import metric_table as table
from tunesmith.metrics.metric_table import Metric
from tunesmith.metrics.rows import Array, Rows, Scale, make_rows, to_numpy
from tunesmith.metrics.uncertainty import Score

LOWER_IS_BETTER = ("loss", "mse", "rmse", "mae", "brier", "ece", "error")
"""Names, or endings of names, of metrics that are not in the table and where a smaller value is the better one."""

DEFAULTS: dict[Task, tuple[str, ...]] = {
    Task.BINARY: ("accuracy", "f1", "precision", "recall", "f1_macro", "matthews_correlation", "auroc"),
    Task.MULTICLASS: ("accuracy", "f1_macro", "f1_weighted", "balanced_accuracy", "matthews_correlation", "auroc"),
    Task.MULTILABEL: ("f1_micro", "f1_macro", "subset_accuracy", "auroc"),
    Task.REGRESSION: ("pearson", "spearmanr", "mse", "mae", "r2"),
}

_ACCURACY = ("accuracy",)
GLUE: dict[str, tuple[Task, tuple[str, ...]]] = {
    "cola": (Task.BINARY, ("matthews_correlation",)),
    "sst2": (Task.BINARY, _ACCURACY),
    "mrpc": (Task.BINARY, ("accuracy", "f1")),
    "qqp": (Task.BINARY, ("accuracy", "f1")),
    "stsb": (Task.REGRESSION, ("pearson", "spearmanr")),
    "mnli": (Task.MULTICLASS, _ACCURACY),
    "mnli_matched": (Task.MULTICLASS, _ACCURACY),
    "mnli_mismatched": (Task.MULTICLASS, _ACCURACY),
    "ax": (Task.MULTICLASS, _ACCURACY),
    "qnli": (Task.BINARY, _ACCURACY),
    "rte": (Task.BINARY, _ACCURACY),
    "wnli": (Task.BINARY, _ACCURACY),
    "hans": (Task.BINARY, _ACCURACY),
}
"""GLUE task -> its label kind and the keys `evaluate`'s glue metric reports."""


def metric_names(task: Task | None = None) -> tuple[str, ...]:
    """The metrics of a task, or of any."""
    return tuple(dict.fromkeys(m.name for m in table.METRICS if task is None or task in m.tasks))


def metric_aliases() -> dict[str, str]:
    """Other spellings -> the name a metric is reported under."""
    return {alias: m.name for m in table.METRICS for alias in m.aliases}


def canonical_name(name: str) -> str:
    """The key a metric is reported under: aliases resolved, an `eval_`, `test_` or `predict_` prefix taken off."""
    plain = name.strip().lower().replace("-", "_")
    for prefix in ("eval_", "test_", "predict_"):
        plain = plain.removeprefix(prefix)
    return metric_aliases().get(plain, plain)


def greater_is_better(name: str) -> bool:
    """Whether a larger value is the better one; a name that is not in the table is judged by its ending."""
    for metric in table.METRICS:
        if metric.name == name:
            return metric.greater_is_better
    return not any(name == ending or name.endswith(f"_{ending}") for ending in LOWER_IS_BETTER)


def metric_of(name: str, task: Task) -> Metric:
    """The metric of this name (or alias) for this task; any other name is a ConfigError."""
    plain, known = canonical_name(name), metric_names(task)
    for metric in table.METRICS:
        if metric.name == plain and task in metric.tasks:
            return metric
    choices = f"For a {task.value} task there are: {', '.join(known)}"
    if plain in metric_names():
        instead = " Use 'f1_macro'." if plain == "f1" else ""
        raise ConfigError(f"metric {name!r} is not defined for a {task.value} task", fix=f"{choices}.{instead}")
    hit = nearest(plain, [*known, *(alias for alias, metric in metric_aliases().items() if metric in known)])
    hint = f"Did you mean {hit!r}? " if hit else ""
    raise ConfigError(f"unknown metric {name!r}", fix=f"{hint}{choices}")


def resolve_glue(name: str) -> tuple[Task, tuple[str, ...]]:
    """Task and metric names of a GLUE task; `sst-2`, `STS-B`, `mnli-mm` are understood."""
    plain = name.strip().lower().replace("-", "_")
    plain = {"sst_2": "sst2", "sts_b": "stsb", "mnli_m": "mnli_matched", "mnli_mm": "mnli_mismatched"}.get(plain, plain)
    if plain not in GLUE:
        hit = nearest(plain, list(GLUE))
        hint = f"Did you mean {hit!r}? " if hit else ""
        raise ConfigError(f"unknown GLUE task {name!r}", fix=f"{hint}There are: {', '.join(GLUE)}")
    return GLUE[plain]


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
        """The metric a run is judged by unless another is named: the first one."""
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
