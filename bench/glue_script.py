"""A fine-tuning script for labeled files in the order of transformers' run_glue.py: the baseline of start_up.py.

`python bench/glue_script.py OPTIONS`: OPTIONS is JSON.
"""

from __future__ import annotations

import csv
import json
import sys
from typing import Any

import numpy as np
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)


def _read_files(options: dict[str, Any]) -> Any:
    suffix = options["train_file"].rsplit(".", 1)[-1]
    files = {split: options[f"{split}_file"] for split in ("train", "validation") if options.get(f"{split}_file")}
    more: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == "tsv" else {}
    kind = {"tsv": "csv", "jsonl": "json"}.get(suffix, suffix)
    raw: Any = load_dataset(kind, data_files=files, cache_dir=options["cache_dir"], **more)
    if "validation" not in raw:
        parts = raw["train"].train_test_split(test_size=0.1, seed=options["seed"])
        raw["train"], raw["validation"] = parts["train"], parts["test"]
    return raw


def _score(answers: Any) -> dict[str, float]:
    found = np.argmax(answers.predictions, axis=1)
    average = "binary" if answers.predictions.shape[1] == 2 else "macro"
    f1 = f1_score(answers.label_ids, found, average=average, zero_division=0)
    return {"accuracy": float(accuracy_score(answers.label_ids, found)), "f1": float(f1)}


def main(options: dict[str, Any]) -> None:
    """Reads, tokenizes, trains, saves, evaluates once: the defaults of transformers."""
    set_seed(options["seed"])
    raw = _read_files(options)
    texts, label = options["text_columns"], options["label_column"]
    names = sorted(raw["train"].unique(label))
    tokenizer: Any = AutoTokenizer.from_pretrained(options["model"])

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer(*(rows[name] for name in texts), truncation=True, max_length=options["max_length"])
        return {**found, "label": [names.index(value) for value in rows[label]]}

    data = raw.map(encode, batched=True, remove_columns=[n for n in raw["train"].column_names if n != label])
    config = AutoConfig.from_pretrained(options["model"], num_labels=len(names))
    model = AutoModelForSequenceClassification.from_pretrained(options["model"], config=config)
    trainer = Trainer(
        model,
        TrainingArguments(options["output_dir"], report_to="none", seed=options["seed"], **options["arguments"]),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_score,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
