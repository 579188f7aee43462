"""`Trainer`, a subclass of `transformers.Trainer`: change one import and keep the script."""

from tunesmith.trainer.trainer import Trainer, TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
