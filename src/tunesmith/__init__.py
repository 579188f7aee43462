"""tunesmith fine-tunes pretrained transformer encoders on labelled text and text pairs."""

from __future__ import annotations

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
    from tunesmith.config.schema import RunConfig
    from tunesmith.curves.panels import sketch_curves
    from tunesmith.curves.plot import draw_curves
    from tunesmith.curves.series import Curves, curves_from_events, load_curves
    from tunesmith.diagnose.advise import diagnose as diagnose_curves
    from tunesmith.encoder.resolve import find_embedded
    from tunesmith.engine.evaluate import TaskLoss, predict_rows
    from tunesmith.engine.loop import train_events
    from tunesmith.engine.optim import make_optimizer
    from tunesmith.engine.plan import Calendar, Plan, Schedule, epoch_ends_for, lr_at
    from tunesmith.engine.state import TrainState
    from tunesmith.fast.strategies import choose_strategies
    from tunesmith.keep.checkpoint import load_checkpoint, save_checkpoint
    from tunesmith.keep.record import Identity
    from tunesmith.labels import Task
    from tunesmith.metrics.suite import load as load_metric
    from tunesmith.metrics.suite import make_suite
    from tunesmith.notebook.estimators import TextClassifier, TextRegressor
    from tunesmith.notebook.from_data import finetune_data as finetune
    from tunesmith.predict.predictor import Predictor
    from tunesmith.ranks.runtime import make_runtime
    from tunesmith.reading.hub import load_from_hub as load_dataset
    from tunesmith.sample import sample_file
    from tunesmith.tokens.batches import Batches, Padding, padding_of
    from tunesmith.tokens.token_rows import TokenRows
    from tunesmith.trainer import Trainer, TrainingArguments

__version__ = "0.1.0"

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
    "choose_strategies",
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
    "sketch_curves",
    "train_events",
]

_HOMES: dict[str, str] = {
    "Batches": "tunesmith.tokens.batches",
    "Calendar": "tunesmith.engine.plan",
    "Console": "tunesmith.cli.console",
    "Curves": "tunesmith.curves.series",
    "DataCollatorWithPadding": "transformers",
    "EarlyStoppingCallback": "transformers",
    "EvalPrediction": "transformers",
    "Identity": "tunesmith.keep.record",
    "Padding": "tunesmith.tokens.batches",
    "Plan": "tunesmith.engine.plan",
    "Predictor": "tunesmith.predict.predictor",
    "RunConfig": "tunesmith.config.schema",
    "Schedule": "tunesmith.engine.plan",
    "Task": "tunesmith.labels",
    "TaskLoss": "tunesmith.engine.evaluate",
    "TextClassifier": "tunesmith.notebook.estimators",
    "TextRegressor": "tunesmith.notebook.estimators",
    "TokenRows": "tunesmith.tokens.token_rows",
    "TrainState": "tunesmith.engine.state",
    "Trainer": "tunesmith.trainer",
    "TrainerCallback": "transformers",
    "TrainingArguments": "tunesmith.trainer",
    "choose_strategies": "tunesmith.fast.strategies",
    "curves_from_events": "tunesmith.curves.series",
    "diagnose_curves": "tunesmith.diagnose.advise:diagnose",
    "draw_curves": "tunesmith.curves.plot",
    "epoch_ends_for": "tunesmith.engine.plan",
    "find_embedded": "tunesmith.encoder.resolve",
    "finetune": "tunesmith.notebook.from_data:finetune_data",
    "get_scheduler": "transformers",
    "load_checkpoint": "tunesmith.keep.checkpoint",
    "load_config": "tunesmith.config.load",
    "load_curves": "tunesmith.curves.series",
    "load_dataset": "tunesmith.reading.hub:load_from_hub",
    "load_metric": "tunesmith.metrics.suite:load",
    "lr_at": "tunesmith.engine.plan",
    "make_optimizer": "tunesmith.engine.optim",
    "make_runtime": "tunesmith.ranks.runtime",
    "make_suite": "tunesmith.metrics.suite",
    "padding_of": "tunesmith.tokens.batches",
    "predict_rows": "tunesmith.engine.evaluate",
    "sample_file": "tunesmith.sample",
    "save_checkpoint": "tunesmith.keep.checkpoint",
    "set_seed": "transformers",
    "sketch_curves": "tunesmith.curves.panels",
    "train_events": "tunesmith.engine.loop",
}
"""Public name -> module it lives in (`module:name` where it is called otherwise there).

Resolved on first use, so that `import tunesmith` stays cheap.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    module, _, own_name = _HOMES[name].partition(":")
    try:
        return getattr(import_module(module), own_name or name)
    except ModuleNotFoundError as error:
        from tunesmith.errors import name_the_extra

        name_the_extra(error, f"tunesmith.{name}")
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
