"""A speed-up that computes something else is taken off by the command and by the Trainer alike, and the run says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithPadding
from transformers.models.bert.modeling_bert import BertModel

from conftest import tiny_bert
from tiny_model import sentences, write_csv
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.events import Note, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir


@pytest.fixture
def causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, patched by somebody: each token sees only those before it."""
    plain = BertModel._create_attention_masks

    def masks(self: Any, **given: Any) -> Any:
        mask, other = plain(self, **given)
        length = given["embedding_output"].shape[1]
        seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return seen if mask is None else mask & seen, other

    monkeypatch.setattr(BertModel, "_create_attention_masks", masks)


def journal(folder: Path) -> tuple[list[str], list[float | None]]:
    """Notes and losses of a run."""
    events = read_journal(RunDir(folder).journal_file)
    return [e.text for e in events if isinstance(e, Note)], [e.loss for e in events if isinstance(e, StepDone)]


def test_the_command_takes_a_wrong_speed_up_off_and_its_journal_names_it(
    train: Any, causal: None, tmp_path: Path
) -> None:
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(40)]
    file = write_csv(tmp_path / "train.csv", rows)
    options = {"train_file": file, "train_sampling_strategy": "random"}
    fast, _ = train(**options, output_dir=tmp_path / "fast")
    off = {"padding_free": "off", "cls_only_last_layer": "off", "restrict_vocabulary": "off"}
    slow, _ = train(**options, **off, output_dir=tmp_path / "slow")
    notes, losses = journal(fast.run.path)
    assert [note.split(" is off: its step is not the plain one (")[0] for note in notes] == ["padding_free"]
    assert losses == pytest.approx(journal(slow.run.path)[1], abs=2e-5)
    assert journal(slow.run.path)[0] == []


def test_the_trainer_takes_a_wrong_speed_up_off_with_a_warning_and_its_journal_names_it(
    causal: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(Trainer):
        use_speed_ups = False

    found = []
    for kind in (Trainer, Plain):
        folder = tmp_path / kind.__name__
        trainer = kind(
            tiny_bert(),
            arguments(folder, max_steps=5, learning_rate=1e-3, logging_steps=1),
            train_dataset=arrow(40),
            data_collator=DataCollatorWithPadding(tokenizer()),
        )
        with caplog.at_level(logging.WARNING):
            trainer.train()
        found.append(journal(folder))
    (notes, fast), (none, slow) = found
    assert none == []
    assert len(notes) == 2
    assert "Packing is off because it changes the result" in notes[1]
    assert fast == pytest.approx(slow, abs=2e-5)
