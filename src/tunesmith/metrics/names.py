"""Which metrics exist, for which task, which way is better, and what GLUE reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.errors import ConfigError, nearest
from tunesmith.labels import Task

_SINGLE = frozenset({Task.BINARY, Task.MULTICLASS})
_BINARY = frozenset({Task.BINARY})
_REGRESSION = frozenset({Task.REGRESSION})
_ML = frozenset({Task.MULTILABEL})


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """The tasks a metric is defined for, and whether more is better."""

    tasks: frozenset[Task]
    greater_is_better: bool = True


METRICS: dict[str, MetricInfo] = {
    "accuracy": MetricInfo(_SINGLE),
    "f1": MetricInfo(_BINARY),
    "precision": MetricInfo(_BINARY),
    "recall": MetricInfo(_BINARY),
    "f1_macro": MetricInfo(_SINGLE | _ML),
    "f1_micro": MetricInfo(_SINGLE | _ML),
    "f1_weighted": MetricInfo(_SINGLE),
    "precision_macro": MetricInfo(_SINGLE),
    "recall_macro": MetricInfo(_SINGLE),
    "balanced_accuracy": MetricInfo(_SINGLE),
    "matthews_correlation": MetricInfo(_SINGLE),
    "auroc": MetricInfo(_SINGLE | _ML),
    "average_precision": MetricInfo(_BINARY),
    "log_loss": MetricInfo(_SINGLE, greater_is_better=False),
    "subset_accuracy": MetricInfo(_ML),
    "pearson": MetricInfo(_REGRESSION),
    "spearmanr": MetricInfo(_REGRESSION),
    "mse": MetricInfo(_REGRESSION, greater_is_better=False),
    "mae": MetricInfo(_REGRESSION, greater_is_better=False),
    "r2": MetricInfo(_REGRESSION),
}

ALIASES = {
    "acc": "accuracy",
    "mcc": "matthews_correlation",
    "matthews": "matthews_correlation",
    "macro_f1": "f1_macro",
    "micro_f1": "f1_micro",
    "weighted_f1": "f1_weighted",
    "roc_auc": "auroc",
    "auc": "auroc",
    "spearman": "spearmanr",
    "pearsonr": "pearson",
}

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


def canonical_name(name: str) -> str:
    """The key a metric is reported under: aliases resolved, an `eval_`, `test_` or `predict_` prefix taken off."""
    plain = name.strip().lower().replace("-", "_")
    for prefix in ("eval_", "test_", "predict_"):
        plain = plain.removeprefix(prefix)
    return ALIASES.get(plain, plain)


def resolve_names(names: Sequence[str], task: Task) -> tuple[str, ...]:
    """Canonical names in the order given, each once. Unknown names and names of another task are a ConfigError."""
    return tuple(dict.fromkeys(_resolve(name, task) for name in names))


def _resolve(name: str, task: Task) -> str:
    known = [n for n, info in METRICS.items() if task in info.tasks]
    plain = canonical_name(name)
    if plain in known:
        return plain
    choices = f"For a {task.value} task there are: {', '.join(known)}"
    if plain in METRICS:
        instead = " Use 'f1_macro'." if plain == "f1" else ""
        raise ConfigError(f"metric {name!r} is not defined for a {task.value} task", fix=f"{choices}.{instead}")
    hit = nearest(plain, [*known, *(a for a, n in ALIASES.items() if n in known)])
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
