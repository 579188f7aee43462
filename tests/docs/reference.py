"""Makes the reference pages that come from code: `python tests/docs/reference.py` writes them, a test compares."""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "docs" / "reference" / "config.md"
DEFAULTS = ROOT / "docs" / "reference" / "defaults.md"
METRICS = ROOT / "docs" / "reference" / "metrics.md"

WHY = {
    "num_train_epochs": "by the recipe: 3, more for small data (--recipe hf: 3)",
    "per_device_train_batch_size": "by the recipe: 8, more for large data (--recipe hf: 8)",
    "learning_rate": "by the recipe, from the width of the model (--recipe hf: 5e-05)",
    "warmup_steps": "by the recipe: a tenth of the steps (--recipe hf: 0)",
    "weight_decay": "by the recipe: 0 with both",
    "eval_strategy": "epoch when there is an evaluation set, and there is one unless you switch it off: a run without one cannot be judged",
    "save_strategy": "at every evaluation and every 500 steps of a long epoch, so a crash loses little",
    "save_total_limit": "keeps the latest checkpoint (to resume) and the best one (to use)",
    "load_best_model_at_end": "yes when there is an evaluation set: the exported model is the best one",
    "logging_steps": "about 20 times an epoch; every step is in the journal anyway",
    "train_sampling_strategy": "rows of similar length share a step, shuffled over 50 steps; random on a GPU, because packed batches gain nothing from grouping",
    "bf16": "yes on a GPU that supports it, which is reported; float32 on a CPU",
    "project": "",
}
"""Option -> why its default is not the one of transformers."""


def config_page() -> str:
    """Every option, from the schema."""
    return (
        "# Every option\n\n"
        "Flags of `tunesmith train` (`--name value`), keys of a YAML file, and keywords of `tunesmith.finetune`. Command "
        "line over\nfile over default. Made by `python tests/docs/reference.py`.\n\n"
        f"{options_as_markdown()}\n"
    )


def options_as_markdown() -> str:
    """Every option with default and help, one table per section."""
    from tunesmith.config.options import dump_value, list_options

    lines: list[str] = []
    group = None
    for option in list_options().values():
        if option.group != group:
            group = option.group
            lines += ["", f"## {group}", "", "| option | default | meaning |", "|---|---|---|"]
        lines.append(
            f"| `{option.name}` | `{dump_value(option.default)}` | {option.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines).strip()


def differing_defaults() -> dict[str, tuple[Any, Any]]:
    """Option -> (default of transformers, default here), for names that both know."""
    from transformers import TrainingArguments

    from tunesmith.config.options import list_options

    theirs = {f.name: f.default for f in fields(TrainingArguments) if f.init}
    out = {}
    for name, option in list_options().items():
        if name in theirs and not _same(theirs[name], option.default):
            out[name] = (_plain(theirs[name]), _plain(option.default))
    return out


def defaults_page() -> str:
    """The options whose default is another one than in transformers."""
    lines = [
        "# Defaults that differ from transformers",
        "",
        "`tunesmith train` and `tunesmith.finetune` use the names of `transformers.TrainingArguments` with these other defaults. With",
        "`tunesmith.Trainer` the defaults are those of `TrainingArguments`: a script keeps its meaning.",
        "Made by `python tests/docs/reference.py` from both schemas; options not listed have the same default.",
        "",
        "| option | transformers | tunesmith | why |",
        "|---|---|---|---|",
    ]
    for name, (theirs, ours) in differing_defaults().items():
        shown = "by the run" if ours is None else f"`{ours}`"
        lines.append(f"| `{name}` | `{theirs}` | {shown} | {WHY[name]} |")
    lines += [
        "",
        "Not options, but other behavior:",
        "",
        "| | transformers | tunesmith |",
        "|---|---|---|",
        "| padding | as the collator says | each batch to its longest row, or none if the model can be packed |",
        "| a loss that is NaN or infinite | logged as 0.0, training continues | the update is skipped, and the run stops with exit code 6 |",
        "| accumulation | losses of micro-batches averaged for models without `num_items_in_batch` | divided once, by the rows of the step |",
        "| predictions | in the order of the sampler with length grouping | always in input order |",
        "| validation data | none unless given | a tenth of the training rows, seeded and stratified, unless given |",
        "| out of memory | fails, or halves the batch and with it the experiment | halves the micro-batch, same examples per step |",
    ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric, from the table."""
    from tunesmith.metrics.table import METRICS as TABLE

    lines = [
        "# Every metric",
        "",
        "Names of `--metric_name`, `--metric_for_best_model`, `tunesmith.load_metric` and the keys of results. Every score is reported with",
        "its number of rows and a 95% interval. Values equal scikit-learn's; what rows do not define is `null`, never 0.",
        "Made by `python tests/docs/reference.py` from `metrics/table.py`, the one file to change for a new metric.",
        "",
        "| metric | tasks | what it is | better | 95% interval | also understood |",
        "|---|---|---|---|---|---|",
    ]
    for metric in TABLE:
        tasks = ", ".join(sorted(task.value for task in metric.tasks))
        better = "higher" if metric.greater_is_better else "lower"
        aliases = ", ".join(f"`{alias}`" for alias in metric.aliases)
        lines.append(f"| `{metric.name}` | {tasks} | {metric.help} | {better} | {metric.method} | {aliases} |")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if value.__class__.__module__ == "dataclasses":
        return None
    if isinstance(value, tuple) and len(value) == 1:
        return value[0]
    if hasattr(value, "value"):
        return value.value
    return None if value in ((), [], {}) else value


def _same(theirs: Any, ours: Any) -> bool:
    a, b = _plain(theirs), _plain(ours)
    return a == b or (not a and not b and type(a) is not float and type(b) is not float and not (a == 0) ^ (b == 0))


if __name__ == "__main__":
    CONFIG.write_text(config_page(), encoding="utf-8")
    DEFAULTS.write_text(defaults_page(), encoding="utf-8")
    METRICS.write_text(metrics_page(), encoding="utf-8")
