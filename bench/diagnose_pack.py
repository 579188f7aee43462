"""Data and models for bench/diagnose_runs.py on a machine that has no ../shared: small enough to be carried there.

    python bench/diagnose_pack.py --pack scratch/bank_data                # here: what SHARED_DIR has, 10 to 20 MB
    python bench/diagnose_pack.py --unpack scratch/bank_data /tmp/shared  # there; then SHARED_DIR=/tmp/shared

Weights are rounded to a few levels with a scale for each row. Of each table of tokens only the rows that the data needs are
carried; the others are zero there. Unpacking also makes granite-3-layers, the granite encoder without its upper
three layers.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

GRANITE = "granite-embedding-30m-english"
TABLE = "embeddings.word_embeddings.weight"
KEPT_LAYERS = 3
LEFT_OUT = (".parquet", "merges.txt", "vocab.json", "vocab.txt", ".md", "data_config.json")
"""tokenizer.json has what the vocabulary files have."""
LEVELS, TABLE_LEVELS = 18, 9
"""Of a weight above and below zero: a rounding error of about 5% and 10% of a row's spread."""
LENGTH = 160
"""Tokens of a text at most; few tasks read more."""
MOST_LETTERS = 1000
"""Of a cell; no task reads more tokens or counts more words."""
MOST_LINES, MOST_HELD_OUT = 2400, 800
"""Of a table of training rows, and of another one: tasks of more rows use fewer there."""


def main() -> None:
    """Packs or unpacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write what is to be carried")
    parser.add_argument("--unpack", type=Path, nargs=2, metavar=("FOLDER", "SHARED"), help="make a shared folder of it")
    parser.add_argument("--least", type=int, default=1, help="a token that is rarer in the data is zero there")
    args = parser.parse_args()
    if args.pack:
        pack(args.pack, args.least)
    if args.unpack:
        unpack(*args.unpack)


def pack(target: Path, least: int) -> None:
    """Writes `files.json.xz` and one file for the weights of each model."""
    from diagnose_sources import SHARED

    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    models = sorted(path.parent for path in (SHARED / "models").glob("*/model.safetensors"))
    for root in (*sorted((SHARED / "data").iterdir()), *models):
        for path in sorted(root.glob("**/*")):
            if path.is_file() and not path.name.endswith((*LEFT_OUT, ".safetensors")):
                files[path.relative_to(SHARED).as_posix()] = _lines(path)
    (target / "files.json.xz").write_bytes(lzma.compress(json.dumps(files).encode()))
    texts = [cell for name, text in files.items() if name.endswith(".tsv") for cell in re.split(r"[\t\n]", text)]
    for folder in models:
        _pack_weights(folder, texts, least, target / f"{folder.name}.xz")
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")


def _lines(path: Path) -> str:
    text = path.read_bytes().decode("utf-8")
    if path.suffix != ".tsv":
        return text
    most = MOST_LINES if path.name.startswith("train") else MOST_HELD_OUT
    rows = (line.split("\t") for line in text.split("\n")[:most] if line)
    return "".join("\t".join(cell[:MOST_LETTERS] for cell in row) + "\n" for row in rows)


def _pack_weights(folder: Path, texts: list[str], least: int, target: Path) -> None:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.no_padding()
    counts = Counter(id_ for some in tokenizer.encode_batch_fast(texts) for id_ in some.ids)
    used = {id_ for id_, count in counts.items() if count >= least}
    used |= set(tokenizer.get_added_tokens_decoder())
    rows = np.array(sorted(used), dtype=np.int32)
    weights = load_file(folder / "model.safetensors")
    weights = {name: values for name, values in weights.items() if values.dtype.kind == "f"}
    shapes = {name: list(values.shape) for name, values in weights.items()}
    parts = [_round(weights.pop(TABLE)[rows], TABLE_LEVELS), *(_round(values, LEVELS) for values in weights.values())]
    head = json.dumps({"shapes": shapes, "rows": len(rows)}).encode()
    data = rows.tobytes() + b"".join(scale for scale, _ in parts) + b"".join(levels for _, levels in parts)
    target.write_bytes(lzma.compress(head + b"\n" + data, preset=1))


def _round(values: Any, levels: int) -> tuple[bytes, bytes]:
    """A scale for each row (a vector is one row), and the levels."""
    table = values.astype(np.float32).reshape(-1, values.shape[-1])
    most = 127 if len(table) == 1 else levels
    scale = np.abs(table).max(axis=1, keepdims=True) / most + 1e-12
    return scale.astype(np.float32).tobytes(), np.rint(table / scale).astype(np.int8).tobytes()


def unpack(source: Path, shared: Path) -> None:
    """Makes `data` and `models` of what `pack` wrote."""
    shared.mkdir(parents=True, exist_ok=True)
    for name, text in json.loads(lzma.decompress((source / "files.json.xz").read_bytes())).items():
        path = shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for path in sorted(source.glob("*.xz")):
        if path.name != "files.json.xz":
            weights = _unpack_weights(path)
            _save(weights, shared / "models" / path.stem)
            if path.stem == GRANITE:
                _fewer_layers(weights, shared / "models")


def _fewer_layers(weights: dict[str, Any], models: Path) -> None:
    small = models / "granite-3-layers"
    shutil.copytree(models / GRANITE, small, dirs_exist_ok=True)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"num_hidden_layers": KEPT_LAYERS}))
    _save({name: values for name, values in weights.items() if _layer(name) < KEPT_LAYERS}, small)


def _layer(name: str) -> int:
    """The number of the layer a weight belongs to; -1 outside of them."""
    parts = name.split(".")
    return int(parts[parts.index("layer") + 1]) if "layer" in parts else -1


def _save(weights: dict[str, Any], folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _unpack_weights(path: Path) -> dict[str, Any]:
    line, rest = lzma.decompress(path.read_bytes()).split(b"\n", 1)
    head = json.loads(line)
    shapes, count = head["shapes"], head["rows"]
    rows, at = np.frombuffer(rest, np.int32, count), 4 * count
    parts = {TABLE: (count, shapes[TABLE][-1])}
    parts |= {name: (int(np.prod(shape[:-1])), shape[-1]) for name, shape in shapes.items() if name != TABLE}
    scales = {}
    for name, (height, _) in parts.items():
        scales[name], at = np.frombuffer(rest, np.float32, height, at), at + 4 * height
    found = {}
    for name, (height, width) in parts.items():
        levels, at = np.frombuffer(rest, np.int8, height * width, at).reshape(height, width), at + height * width
        found[name] = (levels * scales[name][:, None]).astype(np.float32)
    whole = np.zeros(shapes[TABLE], dtype=np.float32)
    whole[rows] = found[TABLE]
    return {
        name: np.ascontiguousarray((whole if name == TABLE else found[name]).reshape(shapes[name])) for name in shapes
    }


if __name__ == "__main__":
    main()
