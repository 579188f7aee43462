"""tunesmith fine-tunes pretrained transformer encoders on labelled text and text pairs."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

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
    return sorted([*_HOMES, "__version__"])


class _Package(ModuleType):
    """`tunesmith.finetune` is the function, also after the import system has put the folder of that name here."""

    @property
    def finetune(self) -> Any:
        return import_module("tunesmith.finetune").finetune

    @finetune.setter
    def finetune(self, folder: ModuleType) -> None:
        """Called once by the import system."""


sys.modules[__name__].__class__ = _Package
