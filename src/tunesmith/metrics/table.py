"""THE table of metrics: name, tasks, value, 95% interval, direction. A metric is added here and nowhere else.

A `value` is NaN where the rows do not define it (`measure` gives None). The formulas of counts take many confusion matrices
at once, as the resampling in `paired` needs them; tests compare every value with scikit-learn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunesmith.errors import ConfigError, nearest
from tunesmith.labels import Task
from tunesmith.metrics import intervals as limits
from tunesmith.metrics import values
from tunesmith.metrics.intervals import Limits, Score
from tunesmith.metrics.rows import Array, Rows, Scale, make_rows, to_numpy

Interval = Callable[[Rows, float, float, int], Limits | None]
"""Rows, value, confidence and seed -> limits; None where the rows are too few or constant."""
CountLimits = Callable[[Array, float, float], Limits]
WithInfluence = Callable[[Rows], tuple[float, Array]]

SINGLE = frozenset({Task.BINARY, Task.MULTICLASS})
BINARY = frozenset({Task.BINARY})
MULTILABEL = frozenset({Task.MULTILABEL})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of some tasks. A name stands twice where tasks define it differently."""

    name: str
    tasks: frozenset[Task]
    help: str
    value: Callable[[Rows], float]
    interval: Interval
    method: str
    """How the interval is made, as reported."""
    greater_is_better: bool = True
    aliases: tuple[str, ...] = ()
    of_counts: Callable[[Array], Array] | None = None
    """The value from confusion matrices (..., k, k), where it depends on them alone."""
    counts_right_rows: bool = False
    """It is the share of rows that are right: two models are then compared by McNemar's test."""

    def measure(self, rows: Rows) -> float | None:
        """The value, or None where these rows do not define it."""
        value = self.value(rows) if len(rows) and rows.sound else math.nan
        return value if math.isfinite(value) else None

    def score(self, rows: Rows, *, confidence: float = 0.95, seed: int = 0) -> Score:
        """The value with its interval. `seed` matters to intervals that are resampled."""
        value = self.measure(rows)
        if value is None:
            return Score(None, None, None, len(rows), "none")
        found = self.interval(rows, value, confidence, seed)
        if found is None:
            return Score(value, None, None, len(rows), "none: too few or constant rows")
        # Rounding may leave a limit a hair on the wrong side of the value.
        return Score(value, min(found[0], value), max(found[1], value), len(rows), self.method)


def _count(
    name: str, help: str, formula: Callable[[Array], Array], interval: CountLimits, method: str, **more: Any
) -> Metric:
    """A metric of confusion matrices, of single-label tasks by default."""

    def of_rows(rows: Rows, value: float, confidence: float, seed: int) -> Limits:
        return interval(values.counts_of(rows), value, confidence)

    def value(rows: Rows) -> float:
        return float(formula(values.counts_of(rows)))

    tasks = more.pop("tasks", SINGLE)
    return Metric(name, tasks, help, value, of_rows, method, of_counts=formula, **more)


def _influence(
    name: str,
    tasks: frozenset[Task],
    help: str,
    parts: WithInfluence,
    method: str,
    least: Callable[[Rows], float],
    **more: Any,
) -> Metric:
    """A metric whose variance is the sum of its rows' squared influences; a value of 0 or 1 is judged by `least` rows."""

    def interval(rows: Rows, value: float, confidence: float, seed: int) -> Limits:
        _, influence = parts(rows)
        return limits.effective_limits(value, float(influence @ influence), rows=least(rows), confidence=confidence)

    return Metric(name, tasks, help, lambda rows: parts(rows)[0], interval, method, **more)


def _number(
    name: str, help: str, formula: Callable[[Array, Array], float], interval: Any, method: str, **more: Any
) -> Metric:
    """A metric of one predicted number a row."""
    return Metric(
        name,
        frozenset({Task.REGRESSION}),
        help,
        lambda rows: formula(rows.references, rows.decisions),
        lambda rows, value, confidence, seed: interval(rows.references, rows.decisions, value, confidence),
        method,
        **more,
    )


def _of_class_1(trials: Callable[[Array], Array]) -> CountLimits:
    return lambda counts, value, confidence: limits.wilson_pair(value, trials(counts)[1], confidence)


def _by_class(trials: Callable[[Array], Array], *, absent: bool) -> CountLimits:
    """The mean over classes of hits / trials; `absent`: a class without trials counts."""

    def interval(counts: Array, value: float, confidence: float) -> Limits:
        seen = values.seen_classes(counts)
        tried, hits = trials(seen), np.diagonal(seen)
        used = np.ones(len(tried), bool) if absent else tried > 0
        share = hits[used] / np.maximum(tried[used], 1)
        return limits.combine_limits(share, *limits.wilson_limits(share, tried[used], confidence))

    return interval


def _f1_by_class(counts: Array, value: float, confidence: float) -> Limits:
    seen = values.seen_classes(counts)
    low, high = limits.f1_limits(seen, confidence)
    return limits.combine_limits(values.per_class_f1(seen), low, high, limits.f1_correlation(seen))


def _f1_of_class_1(counts: Array, value: float, confidence: float) -> Limits:
    low, high = limits.f1_limits(counts, confidence)
    return float(low[1]), float(high[1])


def _designed(design: Callable[[Array], tuple[float, float]], floor: float) -> CountLimits:
    return lambda counts, value, confidence: limits.designed_limits(
        design(values.seen_classes(counts)), value, counts.sum(), floor=floor, confidence=confidence
    )


def _all_rows(counts: Array, value: float, confidence: float) -> Limits:
    return limits.wilson_pair(value, counts.sum(), confidence)


def _predicted(counts: Array) -> Array:
    result: Array = counts.sum(0)
    return result


def _true(counts: Array) -> Array:
    result: Array = counts.sum(1)
    return result


def _auroc(rows: Rows) -> tuple[float, Array]:
    if rows.probabilities is None:
        return math.nan, np.zeros(len(rows))
    return values.auroc_one_vs_rest(rows.references, rows.probabilities)


def _auroc_multilabel(rows: Rows) -> tuple[float, Array]:
    if rows.probabilities is None:
        return math.nan, np.zeros(len(rows))
    return values.auroc_macro_parts(rows.references, rows.probabilities)


def _smallest_class(rows: Rows) -> float:
    assert rows.probabilities is not None
    return float(np.bincount(rows.references, minlength=rows.probabilities.shape[1]).min())


def _average_precision(rows: Rows) -> float:
    if rows.probabilities is None:
        return math.nan
    return values.average_precision(rows.references == 1, values.log_odds(rows.probabilities))


def _average_precision_limits(rows: Rows, value: float, confidence: float, seed: int) -> Limits:
    assert rows.probabilities is not None
    positive = rows.references == 1
    variance = values.average_precision_variance(positive, values.log_odds(rows.probabilities), seed)
    return limits.effective_limits(value, variance, rows=float(positive.sum()), confidence=confidence)


def _row_losses(rows: Rows) -> Array:
    if rows.probabilities is None:
        return np.full(len(rows), np.nan)
    return values.row_log_loss(rows.references, rows.probabilities)


def _squares(x: Array, y: Array, value: float, confidence: float) -> Limits | None:
    return limits.log_mean_limits((x - y) ** 2, confidence)


def _distances(x: Array, y: Array, value: float, confidence: float) -> Limits | None:
    return limits.log_mean_limits(np.abs(x - y), confidence)


_COMBINED, _EFFECTIVE, _LOG = "wilson by class, combined", "wilson at effective n", "t on the log scale"

METRICS: tuple[Metric, ...] = (
    _count("accuracy", "Share of rows with the right label.", values.accuracy, _all_rows, "wilson",
           aliases=("acc",), counts_right_rows=True),
    _count("f1", "Harmonic mean of precision and recall of label 1, as in GLUE.", values.f1, _f1_of_class_1,
           "wilson given TP+FP+FN", tasks=BINARY),
    _count("precision", "Share of rows predicted 1 that are 1.", values.precision, _of_class_1(_predicted), "wilson",
           tasks=BINARY),
    _count("recall", "Share of rows that are 1 and predicted 1.", values.recall, _of_class_1(_true), "wilson",
           tasks=BINARY),
    _count("f1_macro", "Mean F1 of the classes.", values.f1_macro, _f1_by_class, _COMBINED, aliases=("macro_f1",)),
    # Every row has one label, so micro F1 is accuracy.
    _count("f1_micro", "F1 over all rows: accuracy.", values.accuracy, _all_rows, "wilson", aliases=("micro_f1",),
           counts_right_rows=True),
    _count("f1_weighted", "F1 of the classes, weighted by their rows.", values.f1_weighted,
           _designed(limits.weighted_f1_design, 0.0), _EFFECTIVE, aliases=("weighted_f1",)),
    _count("precision_macro", "Mean precision of the classes.", values.precision_macro,
           _by_class(_predicted, absent=True), _COMBINED),
    _count("recall_macro", "Mean recall of the classes.", values.recall_macro, _by_class(_true, absent=True), _COMBINED),
    _count("balanced_accuracy", "Mean recall of the classes that are present.", values.balanced_accuracy,
           _by_class(_true, absent=False), _COMBINED),
    _count("matthews_correlation", "Correlation of true and predicted classes (MCC).", values.matthews_correlation,
           _designed(limits.matthews_design, -1.0), _EFFECTIVE, aliases=("mcc", "matthews")),
    _influence("auroc", SINGLE, "Area under the ROC curve; one class against the rest, mean over classes.", _auroc,
               f"DeLong, {_EFFECTIVE}", _smallest_class, aliases=("roc_auc", "auc")),
    Metric("average_precision", BINARY, "Area under the steps of the precision-recall curve of label 1.",
           _average_precision, _average_precision_limits, f"bootstrap, {_EFFECTIVE}"),
    Metric("log_loss", SINGLE, "Mean of minus the log probability of the right label.",
           lambda rows: float(_row_losses(rows).mean()),
           lambda rows, value, confidence, seed: limits.log_mean_limits(_row_losses(rows), confidence), _LOG,
           greater_is_better=False),
    _influence("f1_macro", MULTILABEL, "Mean F1 of the labels.",
               lambda rows: values.f1_macro_parts(rows.references, rows.decisions), _EFFECTIVE, len),
    _influence("f1_micro", MULTILABEL, "F1 over all cells of rows and labels.",
               lambda rows: values.f1_micro_parts(rows.references, rows.decisions), _EFFECTIVE, len),
    _influence("auroc", MULTILABEL, "Area under the ROC curve, mean over labels.", _auroc_multilabel, _EFFECTIVE, len),
    Metric("subset_accuracy", MULTILABEL, "Share of rows with every label right.",
           lambda rows: values.subset_accuracy(rows.references, rows.decisions),
           lambda rows, value, confidence, seed: limits.wilson_pair(value, len(rows), confidence), "wilson",
           counts_right_rows=True),
    _number("pearson", "Linear correlation.", values.pearson, limits.pearson_limits, "robust Fisher z",
            aliases=("pearsonr",)),
    _number("spearmanr", "Rank correlation.", values.spearmanr, limits.spearman_limits, "robust Fisher z",
            aliases=("spearman",)),
    _number("mse", "Mean squared error.", values.mse, _squares, _LOG, greater_is_better=False),
    _number("mae", "Mean absolute error.", values.mae, _distances, _LOG, greater_is_better=False),
    _number("r2", "Share of the variance that is explained.", values.r2, limits.r2_limits, _LOG),
)  # fmt: skip
"""In the order in which names are listed."""


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
    return tuple(dict.fromkeys(m.name for m in METRICS if task is None or task in m.tasks))


def metric_aliases() -> dict[str, str]:
    """Other spellings -> the name a metric is reported under."""
    return {alias: m.name for m in METRICS for alias in m.aliases}


def canonical_name(name: str) -> str:
    """The key a metric is reported under: aliases resolved, an `eval_`, `test_` or `predict_` prefix taken off."""
    plain = name.strip().lower().replace("-", "_")
    for prefix in ("eval_", "test_", "predict_"):
        plain = plain.removeprefix(prefix)
    return metric_aliases().get(plain, plain)


def greater_is_better(name: str) -> bool:
    """Whether a larger value is the better one; a name that is not in the table is judged by its ending."""
    for metric in METRICS:
        if metric.name == name:
            return metric.greater_is_better
    return not any(name == ending or name.endswith(f"_{ending}") for ending in LOWER_IS_BETTER)


def metric_of(name: str, task: Task) -> Metric:
    """The metric of this name (or alias) for this task; any other name is a ConfigError."""
    plain, known = canonical_name(name), metric_names(task)
    for metric in METRICS:
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
