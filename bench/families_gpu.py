"""Time per training step on a GPU, by architecture: tunesmith's Trainer compared with transformers'.

    .venv/bin/python bench/common.py                              # once, on a machine with ../shared
    python bench/families_gpu.py [--shapes ...] [--batch 8 64] [--rounds 2] [--output FILE.json]

Random weights, MRPC token ids, dropout on. The Trainers take turns in one process, each with a new model. Steps in which
CUDA graphs are captured are not counted. Prints and writes the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import tunesmith
from common import arrow_rows, collator, describe_run, engine_rows
from scripts_gpu import time_steps

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
DEBERTA = {
    "vocab_size": 128100, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "max_relative_positions": -1, "position_biased_input": False,
    "type_vocab_size": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu", "max_position_embeddings": 512,
}  # fmt: skip
BART = {
    "vocab_size": 30522, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "pad_token_id": 0, "bos_token_id": 101,
    "eos_token_id": 102, "decoder_start_token_id": 102,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert", {}),
    "deberta-v3-base": ("deberta-v2", BASE | DEBERTA | {"layer_norm_eps": 1e-7}),
    "modernbert-base": ("modernbert", {"classifier_pooling": "mean"}),
    "mpnet-base": ("mpnet", BASE | {"vocab_size": 30527}),
    "bart-base": ("bart", BART),
}
CAPTURE_STEPS = 48


def make_model(shape: str) -> Any:
    """Return a model with random weights on the GPU."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, sizes = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, num_labels=2, **sizes))


def train_some(trainer_class: Any, bf16: bool, shape: str, rows: Any, batch: int) -> float:
    """Train some steps with a new model and return the milliseconds per step after the warm-up."""
    ours = trainer_class is not transformers.Trainer
    skip, steps = (CAPTURE_STEPS, 64) if ours else (4, 16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=skip + steps,
            per_device_train_batch_size=batch,
            bf16=bf16,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10**6,
        )
        trainer = trainer_class(make_model(shape), arguments, train_dataset=rows, data_collator=collator())
        trainer.remove_callback(transformers.PrinterCallback)
        return float(time_steps(trainer, skip)["ms"])


def main() -> None:
    """Print one line per architecture and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    kinds = {
        "ours": (tunesmith.Trainer, True),
        "trainer_bf16": (transformers.Trainer, True),
        "trainer_fp32": (transformers.Trainer, False),
    }
    rows, about = arrow_rows(engine_rows("mrpc", "train")), describe_run("cuda")
    results: dict[str, Any] = {}
    for shape in args.shapes:
        for batch in args.batch:
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(args.rounds):
                for name, (trainer_class, bf16) in kinds.items():
                    times[name].append(train_some(trainer_class, bf16, shape, rows, batch))
            found = {name: statistics.median(some) for name, some in times.items()}
            ratio = min(found["trainer_bf16"], found["trainer_fp32"]) / found["ours"]
            cells = "  ".join(f"{name} {ms:7.2f} ms" for name, ms in found.items())
            print(f"{shape:<18} {batch:>4}  {cells}  speedup {ratio:.2f}", flush=True)
            results.setdefault(shape, {})[str(batch)] = {"ms": found, "ratio": ratio}
            if args.output:  # after each line: the machine may be taken away
                args.output.write_text(json.dumps(about | {"shapes": results}, indent=1))


if __name__ == "__main__":
    main()
