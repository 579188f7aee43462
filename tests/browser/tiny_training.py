"""A model and a table so small that `tunesmith train` takes seconds, for browser tests and benchmarks."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

WORDS = (
    "good",
    "bad",
    "fine",
    "awful",
    "great",
    "poor",
    "film",
    "book",
    "meal",
    "the",
    "a",
    "was",
    "is",
    "very",
    "not",
)


def make_model(folder: Path) -> Path:
    """Write a random two-layer BERT with a vocabulary of twenty words."""
    from transformers import BertConfig, BertModel, set_seed

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 32})
    )
    set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


def make_table(file: Path, *, rows: int = 120, seed: int = 0, noise: float = 0.1) -> Path:
    """Write short reviews whose words determine the label; a tenth of the labels are wrong."""
    pick = random.Random(seed)
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        for _ in range(rows):
            good = pick.random() < 0.5
            word = pick.choice(("good", "fine", "great") if good else ("bad", "awful", "poor"))
            other = " ".join(pick.choice(WORDS) for _ in range(pick.randint(2, 9)))
            label = good if pick.random() >= noise else not good
            writer.writerow(
                [f"the {pick.choice(('film', 'book', 'meal'))} was {word} {other}", "good" if label else "bad"]
            )
    return file


def train_command(model: Path, table: Path, folder: Path, *more: str) -> list[str]:
    """Return the command line of a run."""
    flags = {
        "train_file": table,
        "model_name_or_path": model,
        "output_dir": folder,
        "learning_rate": "1e-3",
        "recipe": "hf",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "tunesmith", "train", *words, "--use_cpu", "--disable_tqdm", "true", *more]
