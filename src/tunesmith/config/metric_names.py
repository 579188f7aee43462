"""Names of the metrics, known before anything heavy is imported. `tunesmith.metrics.suite` computes them."""

from __future__ import annotations

METRIC_NAMES: tuple[str, ...] = (
    "accuracy",
    "f1",
    "f1_macro",
    "f1_micro",
    "f1_weighted",
    "precision",
    "recall",
    "mcc",
    "auroc",
    "pearson",
    "spearman",
)
"""What `metric_name` and `metric_for_best_model` accept (the latter also `loss`)."""
