"""A Hub with a few small repositories, and fixtures to run the real clients against it in a new process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save

from hub.server import Hub, serve
from patience import patient

FEATURES = {
    "sentence1": {"dtype": "string", "_type": "Value"},
    "sentence2": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["not_equivalent", "equivalent"], "_type": "ClassLabel"},
    "idx": {"dtype": "int32", "_type": "Value"},
}
CARD = "---\nconfigs:\n" + "".join(
    f"- config_name: {config}\n  data_files:\n"
    + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "validation", "test"))
    for config in ("mrpc", "broken")
)


def mrpc_parquet(rows: int, *, labeled: bool = True) -> bytes:
    """Return a Parquet file with the features of GLUE MRPC; unlabeled rows have label -1."""
    table = pa.table(
        {
            "sentence1": [f"The cat number {i} sat on the mat." for i in range(rows)],
            "sentence2": [f"On the mat sat cat {i}." for i in range(rows)],
            "label": pa.array([i % 2 if labeled else -1 for i in range(rows)], pa.int64()),
            "idx": pa.array(range(rows), pa.int32()),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def tiny_model_files() -> dict[str, bytes]:
    """Return the files of a one-layer BERT encoder, including files that must never be downloaded."""
    rng = np.random.default_rng(0)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 32, "type_vocab_size": 2}
    config = {"architectures": ["BertModel"], "model_type": "bert", **sizes}
    weights = {"embeddings.word_embeddings.weight": rng.normal(size=(8, 8)).astype(np.float32)}
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": save(weights),
        "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nmat\n",
        "tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer", "model_max_length": 32}',
        "README.md": b"# tiny\n",
        "pytorch_model.bin": b"never fetched",
        "modeling_tiny.py": b"raise SystemExit('never fetched')",
        "onnx/model.json": b"{}",
    }


@pytest.fixture
def hub() -> Iterator[Any]:
    """Start a server with nyu-mll/glue (also under its old name glue), some/model and a model that has only pickles."""
    hub = Hub()
    splits = {"train": mrpc_parquet(3000), "validation": mrpc_parquet(8), "test": mrpc_parquet(9, labeled=False)}
    files = {f"mrpc/{split}-00000-of-00001.parquet": data for split, data in splits.items()}
    hub.add("datasets", "nyu-mll/glue", {"README.md": f"{CARD}---\n# GLUE\n".encode(), **files})
    hub.renamed[("datasets", "glue")] = "nyu-mll/glue"
    hub.add("models", "some/model", tiny_model_files())
    hub.add("models", "some/pickles", {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."})
    with serve(hub):
        yield hub


@dataclass(frozen=True)
class Answer:
    """JSON output of a client call, or its error."""

    value: Any
    error: str | None
    line: str
    seconds: float


Client = Callable[..., list[Answer]]
_SCRIPT = """
import json, sys, time
from tunesmith.data.hub import load_dataset
from tunesmith.errors import TunesmithError
from tunesmith.models.files import resolve_model
def splits(*args, **options):
    found = load_dataset(*args, **options)
    return {name: [len(rows), rows.features["label"].names, rows["label"][:3]] for name, rows in found.items()}
def files(*args, **options):
    folder = resolve_model(*args, **options)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
answers = []
for verb, args, options in json.loads(sys.argv[1]):
    began = time.monotonic()
    answer = {"value": None, "error": None, "line": ""}
    try:
        answer["value"] = {"splits": splits, "files": files}[verb](*args, **options)
    except TunesmithError as error:
        answer |= {"error": type(error).__name__, "line": str(error)}
    answers.append(answer | {"seconds": time.monotonic() - began})
print(json.dumps(answers))
"""


def call(verb: str, *args: Any, **options: Any) -> tuple[str, Any, Any]:
    """Describe a client call: call("splits", "glue", "mrpc") or call("files", "some/model")."""
    return verb, args, options


@pytest.fixture
def client(hub: Any, tmp_path: Path) -> Client:
    """Return a function that runs calls in a new process that uses the server and caches in tmp_path."""

    def run(*calls: Any, **environment: str) -> list[Answer]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONWARNINGS": "ignore"} | environment
        command = [sys.executable, "-c", _SCRIPT, json.dumps(calls)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=patient(120))
        assert done.returncode == 0, done.stderr
        return [Answer(**answer) for answer in json.loads(done.stdout.splitlines()[-1])]

    return run
