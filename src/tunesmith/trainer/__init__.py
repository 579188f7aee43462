"""`Trainer`, a subclass of `transformers.Trainer`: change one import and keep the script."""

from tunesmith.trainer.arguments import TrainingArguments
from tunesmith.trainer.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]
