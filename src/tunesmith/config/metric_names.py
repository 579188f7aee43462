"""Names of the metrics, known before anything heavy is imported. `tunesmith.metrics` computes them; a test keeps both equal."""

from __future__ import annotations

METRIC_NAMES: tuple[str, ...] = (
    "accuracy",
    "f1",
    "precision",
    "recall",
    "f1_macro",
    "f1_micro",
    "f1_weighted",
    "precision_macro",
    "recall_macro",
    "balanced_accuracy",
    "matthews_correlation",
    "auroc",
    "average_precision",
    "log_loss",
    "subset_accuracy",
    "pearson",
    "spearmanr",
    "mse",
    "mae",
    "r2",
)
"""What `metric_name` and `metric_for_best_model` accept (the latter also `loss`)."""

METRIC_ALIASES: dict[str, str] = {
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
"""Other spellings people use -> the name a metric is reported under."""


def spell_metric(name: str) -> str:
    """The name a metric is reported under: `eval_mcc` is `matthews_correlation`. An unknown name comes back as it is."""
    plain = name.strip().lower().replace("-", "_")
    for prefix in ("eval_", "test_", "predict_"):
        plain = plain.removeprefix(prefix)
    plain = METRIC_ALIASES.get(plain, plain)
    return plain if plain in METRIC_NAMES or plain == "loss" else name
