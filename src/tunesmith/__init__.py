"""tunesmith fine-tunes pretrained transformer encoders on labeled text and text pairs."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers: the same names, with their types
    from transformers import DataCollatorWithPadding as DataCollatorWithPadding
    from transformers import EarlyStoppingCallback as EarlyStoppingCallback
    from transformers import EvalPrediction as EvalPrediction
    from transformers import TrainerCallback as TrainerCallback
    from transformers import get_scheduler as get_scheduler
    from transformers import set_seed as set_seed

    from tunesmith.cli.console import Console as Console
    from tunesmith.config.load import load_config as load_config
    from tunesmith.config.options import RunConfig as RunConfig
    from tunesmith.data.batches import Batches as Batches
    from tunesmith.data.batches import Padding as Padding
    from tunesmith.data.batches import TokenRows as TokenRows
    from tunesmith.data.batches import padding_of as padding_of
    from tunesmith.data.hub import load_dataset as load_dataset
    from tunesmith.diagnosis.verdict import diagnose_curves as diagnose_curves
    from tunesmith.inference.predictor import Predictor as Predictor
    from tunesmith.labels import Task as Task
    from tunesmith.metrics.table import load_metric as load_metric
    from tunesmith.metrics.table import make_suite as make_suite
    from tunesmith.models.files import find_embedded as find_embedded
    from tunesmith.report.plots import draw_curves as draw_curves
    from tunesmith.runs.event_log import Curves as Curves
    from tunesmith.runs.event_log import curves_from_events as curves_from_events
    from tunesmith.runs.folder import load_curves as load_curves
    from tunesmith.sample import sample_file as sample_file
    from tunesmith.sklearn import TextClassifier as TextClassifier
    from tunesmith.sklearn import TextRegressor as TextRegressor
    from tunesmith.sklearn import finetune as finetune
    from tunesmith.speedups.apply import apply_speedups as apply_speedups
    from tunesmith.trainer import Trainer as Trainer
    from tunesmith.trainer import TrainingArguments as TrainingArguments
    from tunesmith.training.checkpoint import Identity as Identity
    from tunesmith.training.checkpoint import load_checkpoint as load_checkpoint
    from tunesmith.training.checkpoint import save_checkpoint as save_checkpoint
    from tunesmith.training.distributed import make_runtime as make_runtime
    from tunesmith.training.evaluation import TaskLoss as TaskLoss
    from tunesmith.training.evaluation import predict_rows as predict_rows
    from tunesmith.training.loop import train_events as train_events
    from tunesmith.training.optimizer import make_optimizer as make_optimizer
    from tunesmith.training.schedule import Calendar as Calendar
    from tunesmith.training.schedule import Plan as Plan
    from tunesmith.training.schedule import Schedule as Schedule
    from tunesmith.training.schedule import epoch_ends_for as epoch_ends_for
    from tunesmith.training.schedule import lr_at as lr_at
    from tunesmith.training.state import TrainState as TrainState

__version__ = "1.0.0"

_MODULES = {
    "transformers": "DataCollatorWithPadding EarlyStoppingCallback EvalPrediction TrainerCallback get_scheduler set_seed",
    "tunesmith.cli.console": "Console",
    "tunesmith.config.load": "load_config",
    "tunesmith.config.options": "RunConfig",
    "tunesmith.data.batches": "Batches Padding TokenRows padding_of",
    "tunesmith.data.hub": "load_dataset",
    "tunesmith.diagnosis.verdict": "diagnose_curves",
    "tunesmith.inference.predictor": "Predictor",
    "tunesmith.labels": "Task",
    "tunesmith.metrics.table": "load_metric make_suite",
    "tunesmith.models.files": "find_embedded",
    "tunesmith.report.plots": "draw_curves",
    "tunesmith.runs.event_log": "Curves curves_from_events",
    "tunesmith.runs.folder": "load_curves",
    "tunesmith.sample": "sample_file",
    "tunesmith.sklearn": "TextClassifier TextRegressor finetune",
    "tunesmith.speedups.apply": "apply_speedups",
    "tunesmith.trainer": "Trainer TrainingArguments",
    "tunesmith.training.checkpoint": "Identity load_checkpoint save_checkpoint",
    "tunesmith.training.distributed": "make_runtime",
    "tunesmith.training.evaluation": "TaskLoss predict_rows",
    "tunesmith.training.loop": "train_events",
    "tunesmith.training.optimizer": "make_optimizer",
    "tunesmith.training.schedule": "Calendar Plan Schedule epoch_ends_for lr_at",
    "tunesmith.training.state": "TrainState",
}
"""Module -> its public names, which are imported on first use, so that `import tunesmith` stays cheap."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    # Libraries warn in notebooks without ipywidgets; progress bars of this package don't need them.
    warnings.filterwarnings("ignore", message="IProgress not found")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from tunesmith.errors import name_the_extra

        name_the_extra(error, f"tunesmith.{name}")
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
