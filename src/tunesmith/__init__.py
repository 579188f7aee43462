"""tunesmith fine-tunes pretrained transformer encoders on labeled text and text pairs."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers: the same names, with their types
    from transformers import (
        DataCollatorWithPadding,
        EarlyStoppingCallback,
        EvalPrediction,
        TrainerCallback,
        get_scheduler,
        set_seed,
    )

    from tunesmith.cli.console import Console
    from tunesmith.config.load import load_config
    from tunesmith.config.options import RunConfig
    from tunesmith.data.batches import Batches, Padding, TokenRows, padding_of
    from tunesmith.data.hub import load_from_hub as load_dataset
    from tunesmith.diagnosis.verdict import diagnose as diagnose_curves
    from tunesmith.inference.predictor import Predictor
    from tunesmith.labels import Task
    from tunesmith.metrics.table import load as load_metric
    from tunesmith.metrics.table import make_suite
    from tunesmith.models.files import find_embedded
    from tunesmith.report.plots import draw_curves
    from tunesmith.runs.event_log import Curves, curves_from_events
    from tunesmith.runs.folder import load_curves
    from tunesmith.sample import sample_file
    from tunesmith.sklearn import TextClassifier, TextRegressor
    from tunesmith.sklearn import finetune_data as finetune
    from tunesmith.speedups.apply import apply_speedups
    from tunesmith.trainer import Trainer, TrainingArguments
    from tunesmith.training.checkpoint import Identity, load_checkpoint, save_checkpoint
    from tunesmith.training.distributed import make_runtime
    from tunesmith.training.evaluation import TaskLoss, predict_rows
    from tunesmith.training.loop import train_events
    from tunesmith.training.optimizer import make_optimizer
    from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for, lr_at
    from tunesmith.training.state import TrainState

__version__ = "1.0.0"

__all__ = [
    "Batches",
    "Calendar",
    "Console",
    "Curves",
    "DataCollatorWithPadding",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "Identity",
    "Padding",
    "Plan",
    "Predictor",
    "RunConfig",
    "Schedule",
    "Task",
    "TaskLoss",
    "TextClassifier",
    "TextRegressor",
    "TokenRows",
    "TrainState",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "__version__",
    "apply_speedups",
    "curves_from_events",
    "diagnose_curves",
    "draw_curves",
    "epoch_ends_for",
    "find_embedded",
    "finetune",
    "get_scheduler",
    "load_checkpoint",
    "load_config",
    "load_curves",
    "load_dataset",
    "load_metric",
    "lr_at",
    "make_optimizer",
    "make_runtime",
    "make_suite",
    "padding_of",
    "predict_rows",
    "sample_file",
    "save_checkpoint",
    "set_seed",
    "train_events",
]

_HOMES: dict[str, str] = {
    "Batches": "tunesmith.data.batches",
    "Calendar": "tunesmith.training.schedule",
    "Console": "tunesmith.cli.console",
    "Curves": "tunesmith.runs.event_log",
    "DataCollatorWithPadding": "transformers",
    "EarlyStoppingCallback": "transformers",
    "EvalPrediction": "transformers",
    "Identity": "tunesmith.training.checkpoint",
    "Padding": "tunesmith.data.batches",
    "Plan": "tunesmith.training.schedule",
    "Predictor": "tunesmith.inference.predictor",
    "RunConfig": "tunesmith.config.options",
    "Schedule": "tunesmith.training.schedule",
    "Task": "tunesmith.labels",
    "TaskLoss": "tunesmith.training.evaluation",
    "TextClassifier": "tunesmith.sklearn",
    "TextRegressor": "tunesmith.sklearn",
    "TokenRows": "tunesmith.data.batches",
    "TrainState": "tunesmith.training.state",
    "Trainer": "tunesmith.trainer",
    "TrainerCallback": "transformers",
    "TrainingArguments": "tunesmith.trainer",
    "apply_speedups": "tunesmith.speedups.apply",
    "curves_from_events": "tunesmith.runs.event_log",
    "diagnose_curves": "tunesmith.diagnosis.verdict:diagnose",
    "draw_curves": "tunesmith.report.plots",
    "epoch_ends_for": "tunesmith.training.schedule",
    "find_embedded": "tunesmith.models.files",
    "finetune": "tunesmith.sklearn:finetune_data",
    "get_scheduler": "transformers",
    "load_checkpoint": "tunesmith.training.checkpoint",
    "load_config": "tunesmith.config.load",
    "load_curves": "tunesmith.runs.folder",
    "load_dataset": "tunesmith.data.hub:load_from_hub",
    "load_metric": "tunesmith.metrics.table:load",
    "lr_at": "tunesmith.training.schedule",
    "make_optimizer": "tunesmith.training.optimizer",
    "make_runtime": "tunesmith.training.distributed",
    "make_suite": "tunesmith.metrics.table",
    "padding_of": "tunesmith.data.batches",
    "predict_rows": "tunesmith.training.evaluation",
    "sample_file": "tunesmith.sample",
    "save_checkpoint": "tunesmith.training.checkpoint",
    "set_seed": "transformers",
    "train_events": "tunesmith.training.loop",
}
"""Public name -> module it lives in (`module:name` where it is called otherwise there).

Resolved on first use, so that `import tunesmith` stays cheap.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    # Libraries warn in notebooks without ipywidgets; progress bars of this package don't need them.
    warnings.filterwarnings("ignore", message="IProgress not found")
    module, _, own_name = _HOMES[name].partition(":")
    try:
        return getattr(import_module(module), own_name or name)
    except ModuleNotFoundError as error:
        from tunesmith.errors import name_the_extra

        name_the_extra(error, f"tunesmith.{name}")
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
