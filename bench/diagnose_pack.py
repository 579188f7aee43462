"""Data and models for bench/diagnose_runs.py on a machine that has no ../shared: small enough to be carried there.

    python bench/diagnose_pack.py --pack scratch/bank_data                # here: about 56 MB
    python bench/diagnose_pack.py --unpack scratch/bank_data /tmp/shared  # there; then SHARED_DIR=/tmp/shared

Of each table of tokens only the rows that the data needs are carried, rounded to 8 bits with a scale for each row; the others
are zero there and never read. All other weights are kept exactly: the high and low bytes of half-precision numbers are
compressed apart, because the high ones repeat. Unpacking also makes granite-3-layers, the granite encoder without its upper
three layers.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

MODELS = ("paraphrase-MiniLM-L3-v2", "granite-embedding-30m-english")
TABLE = "embeddings.word_embeddings.weight"
KEPT_LAYERS = 3
LEFT_OUT = (".parquet", "merges.txt", "vocab.json", "vocab.txt", ".md")
"""tokenizer.json has what the vocabulary files have."""


def main() -> None:
    """Packs or unpacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write what is to be carried")
    parser.add_argument("--unpack", type=Path, nargs=2, metavar=("FOLDER", "SHARED"), help="make a shared folder of it")
    args = parser.parse_args()
    if args.pack:
        pack(args.pack)
    if args.unpack:
        unpack(*args.unpack)


def pack(target: Path) -> None:
    """Writes `files.json.xz` and one file for the weights of each model."""
    from diagnose_sources import SHARED

    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for root in (SHARED / "data", *(SHARED / "models" / name for name in MODELS)):
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.name.endswith((*LEFT_OUT, ".safetensors")):
                files[path.relative_to(SHARED).as_posix()] = path.read_bytes().decode("utf-8")
    (target / "files.json.xz").write_bytes(lzma.compress(json.dumps(files).encode()))
    texts = [line for path in sorted((SHARED / "data").rglob("*.tsv")) for line in _cells(path)]
    for name in MODELS:
        _pack_weights(SHARED / "models" / name, texts, target / f"{name}.xz")
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")


def _cells(path: Path) -> list[str]:
    return [cell for line in path.read_text(encoding="utf-8").splitlines()[1:] for cell in line.split("\t")]


def _pack_weights(folder: Path, texts: list[str], target: Path) -> None:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    used = {id_ for some in tokenizer.encode_batch_fast(texts) for id_ in some.ids}
    used |= set(tokenizer.get_added_tokens_decoder())
    # A row that is joined from two has a token at the seam that neither has: all short tokens come along.
    used |= {id_ for token, id_ in tokenizer.get_vocab().items() if len(token) <= 3}
    rows = np.array(sorted(used), dtype=np.int32)
    weights = load_file(folder / "model.safetensors")
    shapes = {name: list(values.shape) for name, values in weights.items()}
    table = weights.pop(TABLE)[rows].astype(np.float32)
    scale = np.abs(table).max(axis=1, keepdims=True) / 127 + 1e-12
    parts = [np.ascontiguousarray(values, dtype=np.float16).reshape(-1).view(np.uint8) for values in weights.values()]
    planes = b"".join(part[k::2].tobytes() for k in (1, 0) for part in parts)
    head = json.dumps({"shapes": shapes, "rows": len(rows)}).encode()
    first = rows.tobytes() + scale.astype(np.float32).tobytes() + np.rint(table / scale).astype(np.int8).tobytes()
    target.write_bytes(lzma.compress(head + b"\n" + first + planes, preset=1))


def unpack(source: Path, shared: Path) -> None:
    """Makes `data` and `models` of what `pack` wrote."""
    shared.mkdir(parents=True, exist_ok=True)
    for name, text in json.loads(lzma.decompress((source / "files.json.xz").read_bytes())).items():
        path = shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for name in MODELS:
        weights = _unpack_weights(source / f"{name}.xz")
        _save(weights, shared / "models" / name)
    large, small = (shared / "models" / name for name in (MODELS[1], "granite-3-layers"))
    shutil.copytree(large, small, dirs_exist_ok=True)
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
    width = shapes[TABLE][1]
    rows, scale = np.frombuffer(rest, np.int32, count), np.frombuffer(rest, np.float32, count, 4 * count)
    table = np.frombuffer(rest, np.int8, count * width, 8 * count).reshape(count, width)
    whole = np.zeros(shapes[TABLE], dtype=np.float16)
    whole[rows] = table * scale[:, None]
    planes = np.frombuffer(rest, np.uint8, offset=8 * count + table.nbytes).reshape(2, -1)
    values = np.stack([planes[1], planes[0]], axis=1).reshape(-1).view(np.float16)
    found, at = {TABLE: whole}, 0
    for name, shape in shapes.items():
        if name != TABLE:
            size = int(np.prod(shape))
            found[name] = np.ascontiguousarray(values[at : at + size].reshape(shape))
            at += size
    return found


if __name__ == "__main__":
    main()
