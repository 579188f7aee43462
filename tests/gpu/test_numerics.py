"""Loss scaling in fp16, step times, and models of transformers in half precision."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu_engine import engine_rows

from common import arrow_rows, collator
from tunesmith import Trainer
from tunesmith.errors import NumericsError
from tunesmith.events import Note, StepDone
from tunesmith.runs.event_log import read_journal

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
STOCK = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "xlm-roberta": transformers.XLMRobertaConfig,
    "camembert": transformers.CamembertConfig,
    "electra": transformers.ElectraConfig,
    "distilbert": transformers.DistilBertConfig,
    "albert": transformers.AlbertConfig,
}


def stock(name: str) -> Any:
    """Return a transformers classifier with random weights."""
    transformers.set_seed(0)
    sizes = SMALL
    if name == "distilbert":
        sizes = {"n_layers": 2, "dim": 128, "n_heads": 2, "hidden_dim": 256}
    config = STOCK[name](vocab_size=30522, num_labels=2, pad_token_id=0, **sizes)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def train(folder: Path, model: Any, *callbacks: Any, **options: Any) -> Trainer:
    arguments = transformers.TrainingArguments(
        str(folder), report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, **options
    )
    rows = arrow_rows(engine_rows("mrpc", "train", 640))
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator(), callbacks=list(callbacks))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", STOCK)
def test_verification_keeps_speedups_of_stock_models(tmp_path: Path, name: str, precision: str) -> None:
    trainer = train(tmp_path, stock(name), max_steps=3, **{precision: True})
    notes = [event.text for event in read_journal(tmp_path / "journal.jsonl") if isinstance(event, Note)]
    assert [note for note in notes if "its results differ from those of the plain step" in note] == []
    assert trainer.state.global_step == 3


def test_persistent_nan_ends_an_fp16_run(tmp_path: Path) -> None:
    class Poison(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
            if state.global_step == 20:
                model.classifier.weight.data.fill_(torch.nan)

    with pytest.raises(NumericsError, match="step 21"):
        train(tmp_path / "bad", stock("bert"), Poison(), max_steps=120, fp16=True)


def test_step_seconds_add_up_to_less_than_wall_time(tmp_path: Path) -> None:
    began = time.perf_counter()
    train(tmp_path, stock("bert"), max_steps=300, bf16=True)
    wall = time.perf_counter() - began
    steps = [event for event in read_journal(tmp_path / "journal.jsonl") if isinstance(event, StepDone)]
    total = sum(event.seconds for event in steps)
    assert len(steps) == 300
    assert 0.05 * wall < total <= wall
