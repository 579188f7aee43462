"""A typical script: parses arguments into dataclasses, saves metrics and state, and writes a model card."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tiny_model import save_tiny_bert, sentences, write_csv

SCRIPT = """
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers import Trainer, TrainingArguments


@dataclass
class Files:
    model: str = field(metadata={"help": "a model folder"})
    data: str = field(metadata={"help": "a folder of csv files"})
    pad_all: bool = field(default=True)


files, args = HfArgumentParser((Files, TrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)
names = ("train", "validation", "test")
raw = load_dataset("csv", data_files={n: f"{files.data}/{n}.csv" for n in names}, cache_dir=f"{args.output_dir}/../cache")
tokenizer = AutoTokenizer.from_pretrained(files.model)
with args.main_process_first(desc="tokenizing"):
    rows = raw.map(
        lambda part: tokenizer(
            part["text"], padding="max_length" if files.pad_all else False, max_length=24, truncation=True
        ),
        batched=True,
    )
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(files.model),
    args=args,
    train_dataset=rows["train"] if args.do_train else None,
    eval_dataset=rows["validation"] if args.do_eval else None,
    compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())},
    processing_class=tokenizer,
    data_collator=default_data_collator if files.pad_all else None,
)
found = {}
if args.do_train:
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    found["resumed_from"] = last and Path(last).name
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or last)
    metrics = {**result.metrics, "train_samples": len(rows["train"])}
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
if args.do_eval:
    metrics = {**trainer.evaluate(eval_dataset=rows["validation"]), "eval_samples": len(rows["validation"])}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
if args.do_predict:
    output = trainer.predict(rows["test"].remove_columns("label"), metric_key_prefix="predict")
    found["predict"] = [sorted(output.metrics), output.label_ids is None, list(output.predictions.shape)]
    found["right"] = float((np.argmax(output.predictions, axis=1) == np.array(raw["test"]["label"])).mean())
trainer.create_model_card(
    finetuned_from=files.model, tasks="text-classification", language="en", dataset_tags="glue", dataset_args="toy", dataset="TOY"
)
print("FOUND " + json.dumps(found))
"""
WORDS = """
--do_train --do_eval --do_predict --num_train_epochs 6 --learning_rate 4e-3 --logging_steps 5 --eval_strategy epoch
--per_device_train_batch_size 16 --save_strategy epoch --save_total_limit 2 --load_best_model_at_end --report_to none
--metric_for_best_model accuracy --use_cpu
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    save_tiny_bert(folder / "model", labels=("bad", "good"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for name, rows, seed in (("train", 160, 0), ("validation", 60, 1), ("test", 31, 2)):
        write_csv(folder / f"{name}.csv", [{"text": t, "label": int(g)} for t, g in sentences(rows, seed)])
    return folder


def run(place: Path, name: str, text: str, *words: str) -> tuple[dict[str, Any], str]:
    file = place / f"{name}.py"
    file.write_text(text)
    given = ["--model", str(place / "model"), "--data", str(place), "--output_dir", str(place / name)]
    out = io.StringIO()
    command = [str(file), *given, *WORDS.split(), *words]
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), mock.patch.object(sys, "argv", command):
        warnings.simplefilter("ignore")
        runpy.run_path(str(file), run_name="__main__")  # a new process would take seconds to import torch
    line = next(x for x in out.getvalue().splitlines() if x.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND ")), out.getvalue()


def changed(text: str) -> str:
    new = text.replace(
        "from transformers import Trainer, TrainingArguments", "from tunesmith import Trainer, TrainingArguments"
    )
    assert new != text
    return new


def results(folder: Path) -> dict[str, Any]:
    return {f.name: json.loads(f.read_text()) for f in folder.glob("*_results.json")}


@pytest.mark.slow
def test_parsed_script_writes_same_files_keys_and_metrics(place: Path) -> None:
    theirs, _ = run(place, "theirs", SCRIPT, "--pad_all", "False")
    ours, text = run(place, "ours", changed(SCRIPT), "--pad_all", "False")
    assert ours["predict"] == theirs["predict"]
    assert ours["right"] > 0.9 < theirs["right"]
    old, new = place / "theirs", place / "ours"
    assert {k: sorted(v) for k, v in results(new).items()} == {k: sorted(v) for k, v in results(old).items()}
    assert results(new)["eval_results.json"]["eval_accuracy"] > 0.9
    names = [{p.name for p in f.iterdir() if not p.name.startswith("checkpoint-")} for f in (old, new)]
    assert names[0] - names[1] == {"training_args.bin"}
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (old, new)]
    assert states[0].keys() == states[1].keys()
    assert [list(e) for e in states[0]["log_history"]] == [list(e) for e in states[1]["log_history"]]
    cards = [
        [s for s in (f / "README.md").read_text().splitlines() if not any(c.isdigit() for c in s)] for f in (old, new)
    ]
    assert [s.replace("theirs", "ours") for s in cards[0]] == cards[1]
    assert "***** train metrics *****" in text
    assert "eval_samples" in text


@pytest.mark.slow
def test_script_run_again_resumes_from_last_checkpoint(place: Path) -> None:
    run(place, "again", changed(SCRIPT))
    weights = (place / "again" / "model.safetensors").read_bytes()
    found, _ = run(place, "again", changed(SCRIPT))
    assert found["resumed_from"] == "checkpoint-60"
    assert (place / "again" / "model.safetensors").read_bytes() == weights
