"""`tunesmith board` as a process, for the browser tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import patient
from tunesmith.inference.server import load_token

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class BoardProcess:
    """`tunesmith board` as a user starts it."""

    def __init__(self, root: Path, state: Path, *, port: int = 0) -> None:
        command = [sys.executable, "-m", "tunesmith", "board", str(root), "--port", str(port)]
        environment = ENVIRONMENT | {"XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.own = next(line.strip() for line in self.process.stdout if "http://" in line).split("/?")[0]
        self.address = f"{self.own}/?token={load_token(state / 'tunesmith' / 'board-token')}"
        self.port = int(self.own.rsplit(":", 1)[1])

    def stop(self) -> int:
        assert self.process.stdout is not None
        self.process.terminate()
        code = self.process.wait(timeout=patient(20))
        self.process.stdout.close()
        return code
