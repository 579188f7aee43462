"""Makes scratch/tokens/<name>.npz from ../shared: token ids, types and labels of MRPC and TREC for machines without `datasets`.

    .venv/bin/python bench/token_ids.py                # bert-base-uncased vocabulary (all-MiniLM-L6-v2)

Also writes scratch/tokens/minilm/: the embedded model with its weights rounded to fp16, small enough to be carried along,
and its tokenizer; scratch/tokens/words.npz: every word of MRPC's training sentences with its token ids, of which
bench/token_files.py makes rows of any length as text and as ids; scratch/tokens/texts.npz: the texts of MRPC's test split.
The files are for measuring only and are never committed.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
OUT = ROOT / "scratch" / "tokens"
SPLITS = {"mrpc": ("train", "validation", "test"), "trec": ("train", "test")}


def read_rows(file: Path) -> list[dict[str, str]]:
    """Rows of a TSV without quoting."""
    with file.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


def write_words(tokenizer: Any) -> None:
    """words.npz: BERT's tokenizer splits at blanks, so the ids of a text are those of its words, one after the other."""
    rows = read_rows(SHARED / "mrpc" / "train.tsv")
    words = " ".join(row[name] for row in rows for name in ("sentence1", "sentence2")).split()
    unique = sorted(set(words))
    ids = dict(zip(unique, tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
    np.savez_compressed(
        OUT / "words.npz",
        text=np.frombuffer("\n".join(words).encode(), dtype=np.uint8),
        offsets=np.cumsum([0, *(len(ids[word]) for word in words)]),
        input_ids=np.concatenate([np.asarray(ids[word], dtype=np.int32) for word in words]),
        ends=np.asarray([tokenizer.cls_token_id, tokenizer.sep_token_id]),
    )
    print("words", len(words))


def write_texts() -> None:
    """texts.npz: the two sentences of each row of MRPC's test split, one a line."""
    rows = read_rows(SHARED / "mrpc" / "test.tsv")
    columns = {name: "\n".join(row[name] for row in rows) for name in ("sentence1", "sentence2")}
    np.savez_compressed(OUT / "texts.npz", **{n: np.frombuffer(t.encode(), dtype=np.uint8) for n, t in columns.items()})


def main() -> None:
    """Writes the arrays and the small model."""
    from safetensors.torch import load_file, save_file

    from tunesmith.models.files import find_embedded, load_tokenizer

    folder = find_embedded()
    tokenizer = load_tokenizer(folder)
    OUT.mkdir(parents=True, exist_ok=True)
    for name, splits in SPLITS.items():
        arrays: dict[str, np.ndarray] = {}
        for split in splits:
            rows = read_rows(SHARED / name / f"{split}.tsv")
            texts = [r.get("sentence1", r.get("text", "")) for r in rows]
            pairs = [r["sentence2"] for r in rows] if name == "mrpc" else None
            encoded = tokenizer(texts, pairs, truncation=True, max_length=128)
            ids = encoded["input_ids"]
            arrays[f"{split}.offsets"] = np.cumsum([0, *map(len, ids)])
            arrays[f"{split}.input_ids"] = np.concatenate([np.asarray(i, dtype=np.int32) for i in ids])
            types = encoded.get("token_type_ids", [[0] * len(i) for i in ids])
            arrays[f"{split}.token_type_ids"] = np.concatenate([np.asarray(t, dtype=np.int32) for t in types])
            arrays[f"{split}.labels"] = np.asarray([int(r["label"]) for r in rows])
        np.savez_compressed(OUT / f"{name}.npz", **arrays)
        print(name, {s: len(arrays[f"{s}.labels"]) for s in splits})
    write_words(tokenizer)
    write_texts()
    small = OUT / "minilm"
    small.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(folder / name, small)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v.half() if v.is_floating_point() else v for k, v in weights.items()},
        small / "model.safetensors",
        {"format": "pt"},
    )
    print(small)


if __name__ == "__main__":
    main()
