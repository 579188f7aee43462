"""Measure the wall-clock time of a job on MRPC, from process start to exit: `tunesmith train` and a transformers script.

    python bench/start_up.py --shape bert-base --rounds 2 --output start_up_h200.json

MRPC is read from scratch/mrpc (train.tsv, validation.tsv), the tokenizer from scratch/tokens/minilm (bench/common.py). With
--shape, the model has random weights; without it, it is all-MiniLM-L6-v2. The first round of each command fills caches and
is not part of the median. The script uses transformers' defaults, follows run_glue.py, and evaluates once.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, TOKENS, describe_run

SHAPES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
}


def run_script(options: dict[str, Any]) -> None:
    """Read, tokenize, train, save and evaluate with transformers and datasets."""
    import numpy as np
    from datasets import load_dataset
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(42)
    raw: Any = load_dataset(
        "csv", data_files=options["files"], cache_dir=options["cache_dir"], delimiter="\t", quoting=csv.QUOTE_NONE
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(options["model"])

    def encode(rows: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=512)}

    def score(predicted: Any) -> dict[str, float]:
        labels = np.argmax(predicted.predictions, axis=1)
        return {
            "accuracy": float(accuracy_score(predicted.label_ids, labels)),
            "f1": float(f1_score(predicted.label_ids, labels)),
        }

    data = raw.map(encode, batched=True, remove_columns=[n for n in raw["train"].column_names if n != "label"])
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(options["model"], num_labels=2),
        TrainingArguments(options["output_dir"], report_to="none", seed=42, **options["arguments"]),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=score,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())


def make_model(shape: str, folder: Path) -> Path:
    """Write a BERT of this shape with random weights and the tokenizer of all-MiniLM-L6-v2."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=30522, **SHAPES[shape])).save_pretrained(folder)
    for file in (*(TOKENS / "minilm").glob("*token*"), TOKENS / "minilm" / "vocab.txt"):
        shutil.copy(file, folder)
    return folder


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each command; {out} stands for its output folder."""
    files = {split: str(args.data / f"{split}.tsv") for split in ("train", "validation")}
    options: dict[str, Any] = {"per_device_train_batch_size": args.batch}
    if args.max_steps:
        options["max_steps"] = args.max_steps
    model = str(make_model(args.shape, folder / args.shape) if args.shape else TOKENS / "minilm")
    train = ["-m", "tunesmith", "train", "--model_name_or_path", model, "--output_dir", "{out}"]
    train += ["--train_file", files["train"], "--validation_file", files["validation"]]
    train += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    script = {"files": files, "model": model, "cache_dir": str(folder / "datasets"), "output_dir": "{out}"}
    words = {"train": train}
    for kind, more in {"script": {}, "script_bf16": {"bf16": True}}.items():
        words[kind] = [__file__, "--script", json.dumps({**script, "arguments": {**options, **more}})]
    return words


def main() -> None:
    """Time the commands in turns; print and write the seconds of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--data", type=Path, default=ROOT / "scratch" / "mrpc")
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--against", nargs="*", default=["script"], choices=["script", "script_bf16"])
    parser.add_argument("--script", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.script:
        run_script(json.loads(args.script))
        return
    import torch

    facts = describe_run("cuda" if torch.cuda.is_available() else "cpu")
    seconds: dict[str, list[float]] = {kind: [] for kind in ("train", *args.against)}
    with tempfile.TemporaryDirectory() as name:
        words = commands(args, Path(name))
        for number in range(args.rounds + 1):
            for kind, rounds in seconds.items():
                out = str(Path(name) / f"{kind}-{number}")
                began = time.monotonic()
                command = [sys.executable, *(word.replace("{out}", out) for word in words[kind])]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                rounds.append(round(time.monotonic() - began, 2))
                print(f"{kind}, round {number}: {rounds[-1]:.1f} s", flush=True)
                found = {k: {"seconds": r, "median": statistics.median(r[1:] or r)} for k, r in seconds.items() if r}
                if args.output:  # after each round: the machine may be taken away
                    args.output.write_text(json.dumps({**facts, "commands": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
