"""Results of a measurement as a small JSON file: what, when, with which versions, on what machine, by which command."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]


def describe_machine(device: str) -> str:
    """The device in a few words."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    count = torch.get_num_threads()
    return f"CPU, {count} thread{'s' if count > 1 else ''}"


def read_commit() -> str:
    """The commit measured, with a + when files differ from it; empty where there is no git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return found.stdout.strip()


def write_record(path: Path | None, *, device: str, results: list[dict[str, Any]], note: str = "") -> None:
    """Writes the file, one result a line; nothing when there is no path."""
    if path is None:
        return
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--note" in words:  # stands beside the command
        at = words.index("--note")
        words = words[:at] + words[at + 2 :]
    head = {
        "command": f"bench/{shlex.join(words)}",
        "date": date.today().isoformat(),
        "machine": describe_machine(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": read_commit(),
        "note": note,
    }
    lines = ",\n".join(f"  {json.dumps(one)}" for one in results)
    text = json.dumps(head, indent=1)[:-2] + f',\n "results": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"written: {path}")


def host_seconds() -> float:
    """Seconds of a plain loop of Python."""
    began, total = time.perf_counter(), 0
    for number in range(10**7):
        total += number
    return time.perf_counter() - began
