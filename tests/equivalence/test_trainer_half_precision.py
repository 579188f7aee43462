"""Half precision under both Trainers on a CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from conftest import tiny_bert
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer


def test_fp16_on_a_cpu_trains_in_float32_as_in_transformers(tmp_path: Path, caplog: Any) -> None:
    seen = {}
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        for name, kind, fp16 in (
            ("plain", Trainer, False),
            ("ours", Trainer, True),
            ("theirs", transformers.Trainer, True),
        ):
            args = arguments(
                tmp_path / name,
                fp16=fp16,
                max_steps=4,
                logging_steps=1,
                learning_rate=1e-3,
                train_sampling_strategy="sequential",
                save_strategy="steps",
                save_steps=2,
            )
            trainer = kind(
                tiny_bert(), args, train_dataset=arrow(40), eval_dataset=arrow(9), processing_class=tokenizer()
            )
            trainer.train()
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            seen[name] = [*losses, trainer.evaluate()["eval_loss"]]
    assert seen["ours"] == seen["plain"]
    assert seen["ours"] == pytest.approx(seen["theirs"], abs=2e-5)
