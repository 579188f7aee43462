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
    from tunesmith.curves.build import curves_from_events, load_curves
    from tunesmith.curves.plot import draw_curves
    from tunesmith.curves.series import Curves
    from tunesmith.curves.sketch import sketch_curves
    from tunesmith.data.batches import Batches, Padding
    from tunesmith.data.hub import load_from_hub as load_dataset
    from tunesmith.data.token_rows import TokenRows
    from tunesmith.diagnose.advise import diagnose as diagnose_curves
    from tunesmith.finetune import finetune
    from tunesmith.labels import Task
    from tunesmith.metrics.suite import load as load_metric
    from tunesmith.metrics.suite import make_suite
    from tunesmith.model.resolve import find_embedded
    from tunesmith.predict.predictor import Predictor, padding_of
    from tunesmith.sample import sample_file
    from tunesmith.train.checkpoint import Identity, load_checkpoint, save_checkpoint
    from tunesmith.train.evaluate import predict_rows
    from tunesmith.train.loop import train_events
    from tunesmith.train.losses import TaskLoss
    from tunesmith.train.optim import make_optimizer
    from tunesmith.train.plan import Calendar, Plan, epoch_ends_for
    from tunesmith.train.runtime import make_runtime
    from tunesmith.train.schedule import Schedule, lr_at
    from tunesmith.train.state import TrainState
    from tunesmith.train.strategies import choose_strategies
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
    "Batches": "tunesmith.data.batches",
    "Calendar": "tunesmith.train.plan",
    "Console": "tunesmith.cli.console",
    "Curves": "tunesmith.curves.series",
    "DataCollatorWithPadding": "transformers",
    "EarlyStoppingCallback": "transformers",
    "EvalPrediction": "transformers",
    "Identity": "tunesmith.train.checkpoint",
    "Padding": "tunesmith.data.batches",
    "Plan": "tunesmith.train.plan",
    "Predictor": "tunesmith.predict.predictor",
    "RunConfig": "tunesmith.config.schema",
    "Schedule": "tunesmith.train.schedule",
    "Task": "tunesmith.labels",
    "TaskLoss": "tunesmith.train.losses",
    "TokenRows": "tunesmith.data.token_rows",
    "TrainState": "tunesmith.train.state",
    "Trainer": "tunesmith.trainer",
    "TrainerCallback": "transformers",
    "TrainingArguments": "tunesmith.trainer",
    "choose_strategies": "tunesmith.train.strategies",
    "curves_from_events": "tunesmith.curves.build",
    "diagnose_curves": "tunesmith.diagnose.advise:diagnose",
    "draw_curves": "tunesmith.curves.plot",
    "epoch_ends_for": "tunesmith.train.plan",
    "find_embedded": "tunesmith.model.resolve",
    "finetune": "tunesmith.finetune",
    "get_scheduler": "transformers",
    "load_checkpoint": "tunesmith.train.checkpoint",
    "load_config": "tunesmith.config.load",
    "load_curves": "tunesmith.curves.build",
    "load_dataset": "tunesmith.data.hub:load_from_hub",
    "load_metric": "tunesmith.metrics.suite:load",
    "lr_at": "tunesmith.train.schedule",
    "make_optimizer": "tunesmith.train.optim",
    "make_runtime": "tunesmith.train.runtime",
    "make_suite": "tunesmith.metrics.suite",
    "padding_of": "tunesmith.predict.predictor",
    "predict_rows": "tunesmith.train.evaluate",
    "sample_file": "tunesmith.sample",
    "save_checkpoint": "tunesmith.train.checkpoint",
    "set_seed": "transformers",
    "sketch_curves": "tunesmith.curves.sketch",
    "train_events": "tunesmith.train.loop",
}
"""Public name -> module it lives in (`module:name` where it is called otherwise there).

Resolved on first use, so that `import tunesmith` stays cheap.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    module, _, own_name = _HOMES[name].partition(":")
    return getattr(import_module(module), own_name or name)


def __dir__() -> list[str]:
    return sorted(__all__)
