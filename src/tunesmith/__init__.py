"""tunesmith fine-tunes pretrained transformer encoders on labelled text and text pairs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "DataCollatorWithPadding": "transformers",
    "EarlyStoppingCallback": "transformers",
    "EvalPrediction": "transformers",
    "Trainer": "tunesmith.trainer",
    "TrainerCallback": "transformers",
    "TrainingArguments": "tunesmith.trainer",
    "get_scheduler": "transformers",
    "set_seed": "transformers",
}
"""Public name -> module it lives in. Resolved on first use, so that `import tunesmith` stays cheap."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
