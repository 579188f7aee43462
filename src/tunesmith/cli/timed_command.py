"""`python -m tunesmith.cli.timed_command FD ...`: the `tunesmith` command, which writes its milestones to an open pipe."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from tunesmith.cli.main import entry
from tunesmith.runs.environment import milestones


class PipeHandler(logging.Handler):
    """One JSON line a milestone: its name, the clock, the processor seconds of this process so far."""

    def __init__(self, pipe: int) -> None:
        super().__init__(logging.INFO)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        line = {"name": record.getMessage(), "clock": time.time(), "processor": time.process_time()}
        os.write(self.pipe, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    milestones.addHandler(PipeHandler(int(sys.argv.pop(1))))
    entry()
