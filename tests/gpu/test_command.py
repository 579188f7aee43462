"""`tunesmith train`, `evaluate` and `predict` on a GPU, from a file to predictions."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from common import TOKENS, read_texts

BART = {
    "vocab_size": 30522, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "eos_token_id": 102, "bos_token_id": 101,
    "pad_token_id": 0, "decoder_start_token_id": 102, "max_position_embeddings": 256, "num_labels": 2,
}  # fmt: skip


def write_pairs(table: Path) -> None:
    """Write MRPC's test pairs, labeled by their shared words."""
    with table.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["sentence1", "sentence2", "label"])
        for a, b in zip(*read_texts(), strict=True):
            writer.writerow([a, b, "same" if len(set(a.split()) & set(b.split())) > 9 else "other"])


def tunesmith(*words: str) -> str:
    command = [sys.executable, "-m", "tunesmith", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_train_evaluate_and_predict_on_gpu_succeed(tmp_path: Path) -> None:
    table, run, labeled = tmp_path / "pairs.csv", tmp_path / "run", tmp_path / "labeled.csv"
    write_pairs(table)
    model = ["--model_name_or_path", str(TOKENS / "minilm")]
    shown = tunesmith("train", "--train_file", str(table), *model, "--num_train_epochs", "2", "--output_dir", str(run))
    assert "bf16" in shown, "the precision is reported"
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    scores = [line["metrics"]["accuracy"] for line in lines if line["event"] == "Evaluated"]
    assert max(scores) > 0.7, "common words are easy to learn"
    assert "accuracy" in tunesmith("evaluate", str(run), "--test_file", str(table))
    tunesmith("predict", str(run), "--input", str(table), "--output", str(labeled))
    with labeled.open(encoding="utf-8", newline="") as handle:
        assert {row["prediction"] for row in csv.DictReader(handle)} == {"same", "other"}
