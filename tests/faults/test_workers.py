"""Worker processes end with their parent, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from patience import patient
from tiny_model import save_tiny_bert

TOKENIZE = """
import sys, time
from pathlib import Path
from tunesmith.data.tokenize import ChunkEncoder, make_token_encoder
from tunesmith.models.files import load_tokenizer
encoder = make_token_encoder(load_tokenizer(Path(sys.argv[1])), 16)
chunks = ChunkEncoder(encoder, has_types=True, processes=2)
chunks.encode([["a good film"] * 4000])
print("ready", flush=True)
time.sleep(600)
"""


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def killed_parent_leaves_no_child(program: str, *words: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = children_of(parent.pid)
        assert len(children) >= 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    until = time.monotonic() + patient(15)
    while time.monotonic() < until and any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.1)
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


def test_tokenizer_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    save_tiny_bert(tmp_path)
    killed_parent_leaves_no_child(TOKENIZE, str(tmp_path))
