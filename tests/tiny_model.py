"""A tiny BERT folder with a real WordPiece tokenizer, and sentences that it can learn to classify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

GOOD = ("good", "fine", "great", "sweet", "bright")
BAD = ("bad", "poor", "awful", "sour", "dull")
PLAIN = ("the", "a", "film", "book", "meal", "song", "was", "is", "very", "quite", "and", "it", "one", "day", "we")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, *GOOD, *BAD, *PLAIN, "not", "x", "y", "##s", "##ly", ".", ",", *"0123456789", "=", "+", "-", "'")


def save_tiny_bert(folder: Path, *, seed: int = 0, labels: tuple[str, ...] | None = None, **options: Any) -> Path:
    """Save a model with 2 layers of 32 dimensions: a classifier for `labels`, or only an encoder."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast, set_seed

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64)
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        **options,
    }
    if labels is not None:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
    config = BertConfig(**settings)
    set_seed(seed)
    model = BertModel(config) if labels is None else BertForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sentences(count: int, seed: int = 0) -> list[tuple[str, bool]]:
    """Return distinct sentences with whether they are good; half are."""
    rng = np.random.default_rng(seed)
    found: dict[str, bool] = {}
    while len(found) < count:
        words = [str(w) for w in rng.choice(PLAIN, int(rng.integers(3, 9)))]
        good = len(found) % 2 == 0
        words.insert(int(rng.integers(len(words) + 1)), str(rng.choice(GOOD if good else BAD)))
        found.setdefault(" ".join(words), good)
    return list(found.items())


def mood(count: int = 40) -> list[dict[str, Any]]:
    """Return sentences as rows with the labels good and bad."""
    return [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(count)]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a CSV file."""
    import csv

    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
