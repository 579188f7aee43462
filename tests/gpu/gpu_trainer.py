"""Trainer runs on a GPU for tests, and differences between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from common import arrow_rows, collator, engine_rows
from tunesmith import Trainer

STEPS = 60


class Uncaptured(Trainer):
    """A Trainer that captures no steps."""

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **options)
        assert self._captured is not None, "steps would not be captured"
        assert self._captured.speedups.graphs is not None, "nothing would have been captured"
        self._captured.speedups.graphs.off = True
        return prepared


class Plain(Trainer):
    """A Trainer without speedups: padded, uncaptured, with transformers' layers."""

    use_speed_ups = False


def run(
    kind: Any, folder: Path, config: Any, width: int | None = None, resume: str | None = None, **options: Any
) -> Any:
    """Train with seeded weights and return the Trainer."""
    transformers.set_seed(0)
    given = {"max_steps": STEPS, "warmup_steps": 5, "weight_decay": 0.01, "eval_strategy": "steps", "eval_steps": 25}
    arguments = transformers.TrainingArguments(
        str(folder),
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 8, **given, **options},
    )
    trainer = kind(
        transformers.AutoModelForSequenceClassification.from_config(config),
        arguments,
        train_dataset=arrow_rows(engine_rows("mrpc", "train", 640)),
        eval_dataset=arrow_rows(engine_rows("mrpc", "validation", 64)),
        data_collator=collator(width),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def apart(one: Any, other: Any, name: str) -> float:
    """Return the largest difference of a logged value, relative to its largest value if that exceeds 1."""
    logs = [[line[name] for line in t.state.log_history if name in line] for t in (one, other)]
    assert len(logs[0]) == len(logs[1]) >= 2, (len(logs[0]), len(logs[1]))
    return max(abs(a - b) for a, b in zip(*logs, strict=True)) / max(1.0, *logs[1])


def weights_apart(one: Any, other: Any, but: str = "no name") -> float:
    """Return the largest difference of a weight, except weights whose names end with `but`."""
    names, theirs = one.model.state_dict(), other.model.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in names.items() if not name.endswith(but))


def replayed(trainer: Any) -> int:
    """Return the number of captured shapes."""
    graphs = trainer._captured.speedups.graphs
    assert len(graphs) == 0, "captured steps outlive the run"
    return 0 if graphs.off else int(graphs._captures)
