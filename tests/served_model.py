"""A run folder with a tiny model and raw HTTP requests, for tests of the prediction service."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tunesmith.runs.folder import RunDir, write_manifest

sys.path.append(str(Path(__file__).parent / "browser"))

KEY = "k" * 43
GOOD = b'{"texts": ["a plain text"]}'


def make_run(folder: Path, seed: int) -> RunDir:
    """Write a run folder with random model weights, or replace its model."""
    from tiny_training import make_model
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    new = folder / f"new-{seed}"
    make_model(new)
    set_seed(seed)
    config = BertConfig.from_pretrained(new, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    BertForSequenceClassification(config).save_pretrained(new)
    facts = {
        "labels": {"names": ["bad", "good"], "task": "binary"},
        "text_columns": ["text"],
        "label_column": "label",
        "max_length": 16,
        "metrics": None,
    }
    (new / "tunesmith.json").write_text(json.dumps(facts))
    if run.model.exists():
        run.model.rename(folder / "old")
    new.rename(run.model)
    return run


def make_sealed_run(folder: Path, seed: int) -> RunDir:
    """Write a run folder with an event log and a manifest, as `tunesmith serve` requires."""
    run = make_run(folder, seed)
    run.journal_file.touch()
    write_manifest(run.model, {"kind": "model"})
    return run


def post(
    port: int, body: bytes, *, path: str = "/predict", key: str = KEY, more: str = "", size: str | None = None
) -> bytes:
    """Return a POST as bytes; `size` replaces the true length."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n{more}"
    if "Content-Type" not in more:
        head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {size or len(body)}\r\n\r\n".encode("utf-8", "surrogateescape") + body


def send(port: int, request: bytes, seconds: float = 5.0) -> tuple[int, bytes]:
    """Return status and body of the first response; status 0 on timeout or if the server closed the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as raw:
        with suppress(ConnectionError):  # the server may respond before it has read the whole request
            raw.sendall(request)
        try:
            while not _is_whole(answer) and (part := raw.recv(65536)):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.1 ") else 0), body


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    size = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0].strip()
    return bool(end) and size.isdigit() and len(body) >= int(size)
