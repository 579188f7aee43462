"""What a run will need before it is started: a child process takes a few of its real steps and writes all that a run writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import ConfigError, ResourceError
from tunesmith.session.inputs import refuse_what_is_not_built

ERROR_MARK = "tunesmith-forecast-error: "


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, the most memory held at once, bytes left on disk; measured, then scaled to all rows and steps."""

    device: str
    steps: int
    peak_bytes: int
    disk_bytes: int
    start_seconds: float
    step_seconds: float
    evaluation_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """All of it, from the start of the process to its end."""
        return self.start_seconds + self.step_seconds + self.evaluation_seconds + self.finish_seconds

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the sum in it."""
        return {**asdict(self), "seconds": self.seconds}


def forecast_run(config: RunConfig) -> Forecast:
    """Measures in a child process, so that its memory is that of one run. Problems of the config or the data are raised."""
    refuse_what_is_not_built(config)
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    options = {name: _plain(value) for name, value in to_dict(config).items() if value is not None}
    command = [sys.executable, "-m", "tunesmith.session.forecast_worker"]
    sent = json.dumps({"begun": time.time(), "options": options})
    done = subprocess.run(command, input=sent, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Forecast(**json.loads(lines[-1]))
    said = [line for line in done.stderr.splitlines() if line.startswith(ERROR_MARK)]
    if said:
        found = json.loads(said[-1].removeprefix(ERROR_MARK))
        error = ConfigError(found["text"])
        error.exit_code = found["exit_code"]
        raise error
    tail = " ".join(done.stderr.split()[-30:])
    raise ResourceError(f"the measured steps ended with exit code {done.returncode}: {tail[-300:]}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
