"""The transformers-shaped door: `from tunesmith import Trainer`."""

from tunesmith.trainer.arguments import TrainingArguments
from tunesmith.trainer.facade import Trainer

__all__ = ["Trainer", "TrainingArguments"]
