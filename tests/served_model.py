"""A run folder with a tiny model, for tests of the prediction service."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import seal

sys.path.append(str(Path(__file__).parent / "browser"))


def make_run(folder: Path, seed: int) -> RunDir:
    """Write a run folder whose model has random weights, or replace its model."""
    from tiny_training import make_model
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    new = folder / f"new-{seed}"
    make_model(new)
    set_seed(seed)
    config = BertConfig.from_pretrained(new, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    BertForSequenceClassification(config).save_pretrained(new)
    facts = {
        "labels": {"names": ["bad", "good"], "task": "binary"},
        "text_columns": ["text"],
        "label_column": "label",
        "max_length": 16,
        "glue_task": None,
        "metrics": None,
    }
    (new / "tunesmith.json").write_text(json.dumps(facts))
    if run.model.exists():
        run.model.rename(folder / "old")
    new.rename(run.model)
    return run


def make_sealed_run(folder: Path, seed: int) -> RunDir:
    """The same with an event log and a manifest, as `tunesmith serve` requires."""
    run = make_run(folder, seed)
    run.journal_file.touch()
    seal(run.model, {"kind": "model"}, {})
    return run
