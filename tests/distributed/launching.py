"""Start ranks as real processes and make sure that none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from patience import patient

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """Result of a launcher."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Return environment variables: one thread per rank, no network, tests importable."""
    here = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return here | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more,
    }  # fmt: skip


def torchrun(*words: str, ranks: int = 2) -> list[str]:
    """Return a torchrun command; it chooses the port itself, so that no other process can take it."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"),
        *("--nproc_per_node", str(ranks), *words),
    ]


def accelerate_launch(*words: str, ranks: int = 2) -> list[str]:
    """Return an accelerate launch command, without `--cpu`, which always starts one process (1.15)."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(ranks), "--multi_gpu"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", "0", *words),
    ]


def start(words: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a launcher in a new session, so that all its processes can be ended with it."""
    return subprocess.Popen(
        words,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> Ended:
    """Wait for a launcher, then end its remaining processes. The limit is longer on a busy machine."""
    try:
        out, err = process.communicate(timeout=patient(seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not over after {seconds} s:\n{out[-2000:]}\n{err[-4000:]}") from None
    return Ended(process.returncode, out, err)
