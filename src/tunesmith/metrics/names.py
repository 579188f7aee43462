"""Names of metrics: which a task has, what GLUE reports, other spellings, which way is better."""

from __future__ import annotations

from tunesmith.errors import ConfigError, nearest
from tunesmith.labels import Task
from tunesmith.metrics import metric_table as table
from tunesmith.metrics.metric_table import Metric

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
