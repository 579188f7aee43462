"""Shared helpers of the measurement scripts: token ids of MRPC and TREC, and result files.

    .venv/bin/python bench/common.py        # write scratch/tokens and scratch/mrpc from ../shared, once

scratch/tokens contains token ids, token types and labels of every split (<name>.npz), the words of MRPC's training sentences
with their token ids (words.npz), MRPC's test sentences (texts.npz), and all-MiniLM-L6-v2 in float16 (minilm/); scratch/mrpc
contains MRPC's tables. A machine with a GPU needs only these folders. They are never committed.
"""

from __future__ import annotations

import csv
import json
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tunesmith.data.batches import Ragged, TokenRows

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
TOKENS = ROOT / "scratch" / "tokens"
SPLITS = {"mrpc": ("train", "validation", "test"), "trec": ("train", "test")}


# --- result files -----------------------------------------------------------------------------------------------------


def read_commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; empty without Git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def describe_run(device: str) -> dict[str, Any]:
    """Return command, date, machine, versions and commit of a measurement."""
    threads = torch.get_num_threads()
    return {
        "command": f"bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": read_commit(),
    }


def write_record(path: Path | None, *, device: str, results: list[dict[str, Any]], note: str = "") -> None:
    """Write results and their origin as JSON, one result per line; do nothing without a path."""
    if path is None:
        return
    lines = ",\n".join(f"  {json.dumps(one)}" for one in results)
    head = json.dumps({**describe_run(device), "note": note}, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    print(f"written: {path}")


# --- read scratch/tokens ----------------------------------------------------------------------------------------------


def engine_rows(name: str, split: str, limit: int | None = None) -> TokenRows:
    """Return the examples of a split for the training loop."""
    with np.load(TOKENS / f"{name}.npz") as data:
        offsets, labels = data[f"{split}.offsets"], data[f"{split}.labels"]
        columns = {c: Ragged(data[f"{split}.{c}"], offsets) for c in ("input_ids", "token_type_ids")}
    rows = TokenRows(columns, np.diff(offsets).astype(np.int32), labels)
    return rows if limit is None else rows.select(np.arange(min(limit, len(rows))))


def trainer_rows(rows: TokenRows) -> list[dict[str, Any]]:
    """Return the examples as a list of dicts, for transformers.Trainer."""
    every = rows.take(np.arange(len(rows)))
    assert rows.labels is not None
    return [
        {
            "input_ids": ids.tolist(),
            "token_type_ids": types.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": int(label),
        }
        for ids, types, label in zip(every["input_ids"], every["token_type_ids"], rows.labels, strict=True)
    ]


def arrow_rows(rows: TokenRows) -> Any:
    """Return the examples as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(trainer_rows(rows))


def collator(multiple_of: int | None = None) -> Any:
    """Return a DataCollatorWithPadding with the tokenizer that produced the ids."""
    from transformers import AutoTokenizer, DataCollatorWithPadding

    return DataCollatorWithPadding(
        AutoTokenizer.from_pretrained(str(TOKENS / "minilm")), pad_to_multiple_of=multiple_of
    )


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad dynamically, as DataCollatorWithPadding does."""
    width = max(len(f["input_ids"]) for f in features)
    out = {
        name: torch.tensor([f[name] + [0] * (width - len(f[name])) for f in features])
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    if "labels" in features[0]:
        out["labels"] = torch.tensor([f["labels"] for f in features])
    return out


def read_texts() -> tuple[list[str], list[str]]:
    """Return the first and second sentences of MRPC's test split."""
    with np.load(TOKENS / "texts.npz") as data:
        first, second = (data[name].tobytes().decode().split("\n") for name in ("sentence1", "sentence2"))
    return first, second


def long_tail_lengths(count: int, seed: int = 1) -> npt.NDArray[np.int64]:
    """Return lognormal lengths from 5 to 512 tokens: half are below 40, 1 in 400 is at least 500."""
    drawn = np.random.default_rng(seed).lognormal(np.log(40.0), 0.9, count)
    return np.clip(np.round(drawn), 5, 512).astype(np.int64)


def make_rows(lengths: npt.NDArray[np.int64], seed: int = 1) -> tuple[TokenRows, list[str]]:
    """Return examples of these lengths as token ids and as text: spans of MRPC's words, with random labels."""
    with np.load(TOKENS / "words.npz") as data:
        words = data["text"].tobytes().decode().split("\n")
        offsets, ids, ends = data["offsets"], data["input_ids"], data["ends"]
    rng = np.random.default_rng(seed + 1)
    last = int(np.searchsorted(offsets, offsets[-1] - lengths.max()))
    start = rng.integers(0, last, len(lengths))
    stop = np.searchsorted(offsets, offsets[start] + lengths - 2, side="right") - 1
    sizes = offsets[stop] - offsets[start] + 2
    where = np.concatenate(([0], np.cumsum(sizes)))
    inside = np.arange(where[-1]) - np.repeat(where[:-1], sizes) - 1  # -1 at [CLS]
    values = ids[np.clip(inside + np.repeat(offsets[start], sizes), 0, len(ids) - 1)]
    values[where[:-1]], values[where[1:] - 1] = ends
    columns = {"input_ids": Ragged(values, where), "token_type_ids": Ragged(np.zeros_like(values), where)}
    rows = TokenRows(columns, sizes.astype(np.int32), rng.integers(0, 2, len(lengths)))
    return rows, [" ".join(words[a:b]) for a, b in zip(start, stop, strict=True)]


# --- write scratch/tokens ---------------------------------------------------------------------------------------------


def _read_tsv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


def _bytes(lines: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer("\n".join(lines).encode(), dtype=np.uint8)


def _write_words(tokenizer: Any) -> None:
    """Write words.npz. BERT's tokenizer splits at spaces, so the ids of a text are the ids of its words in order."""
    rows = _read_tsv(SHARED / "mrpc" / "train.tsv")
    words = " ".join(row[name] for row in rows for name in ("sentence1", "sentence2")).split()
    unique = sorted(set(words))
    ids = dict(zip(unique, tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
    np.savez_compressed(
        TOKENS / "words.npz",
        text=_bytes(words),
        offsets=np.cumsum([0, *(len(ids[word]) for word in words)]),
        input_ids=np.concatenate([np.asarray(ids[word], dtype=np.int32) for word in words]),
        ends=np.asarray([tokenizer.cls_token_id, tokenizer.sep_token_id]),
    )


def main() -> None:
    """Write token ids, texts and the small model to scratch/tokens."""
    from safetensors.torch import load_file, save_file

    from tunesmith.models.files import find_embedded, load_tokenizer

    folder = find_embedded()
    tokenizer = load_tokenizer(folder)
    TOKENS.mkdir(parents=True, exist_ok=True)
    for name, splits in SPLITS.items():
        arrays: dict[str, Any] = {}
        for split in splits:
            rows = _read_tsv(SHARED / name / f"{split}.tsv")
            texts = [r.get("sentence1", r.get("text", "")) for r in rows]
            pairs = [r["sentence2"] for r in rows] if name == "mrpc" else None
            encoded = tokenizer(texts, pairs, truncation=True, max_length=128)
            ids = encoded["input_ids"]
            types = encoded.get("token_type_ids", [[0] * len(i) for i in ids])
            arrays[f"{split}.offsets"] = np.cumsum([0, *map(len, ids)])
            for column, values in {"input_ids": ids, "token_type_ids": types}.items():
                arrays[f"{split}.{column}"] = np.concatenate([np.asarray(v, dtype=np.int32) for v in values])
            arrays[f"{split}.labels"] = np.asarray([int(r["label"]) for r in rows])
        np.savez_compressed(TOKENS / f"{name}.npz", **arrays)
    _write_words(tokenizer)
    test = _read_tsv(SHARED / "mrpc" / "test.tsv")
    columns = {name: _bytes([row[name] for row in test]) for name in ("sentence1", "sentence2")}
    np.savez_compressed(TOKENS / "texts.npz", **columns)
    small = TOKENS / "minilm"
    small.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(folder / name, small)
    weights = load_file(folder / "model.safetensors")
    halves = {k: v.half() if v.is_floating_point() else v for k, v in weights.items()}
    save_file(halves, small / "model.safetensors", {"format": "pt"})
    shutil.copytree(SHARED / "mrpc", ROOT / "scratch" / "mrpc", dirs_exist_ok=True)
    print(f"written: {ROOT / 'scratch'}")


if __name__ == "__main__":
    main()
