"""The testing end of the fork server, and what "Same" means. Imports no torch."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import patient
from tunesmith.errors import CheckpointError
from tunesmith.events import WALL_CLOCK, EpochStarted, Evaluated, Improved, RowsEvaluated, StepDone, to_json
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import read_manifest, verify
from tunesmith.runs.writing import TMP_PREFIX
from warm import ENVIRONMENT, warm_python

TESTS = Path(__file__).resolve().parents[1]
FULL = os.environ.get("TUNESMITH_FAULT_TRIALS", "") == "full"


def size(full: int, ci: int) -> int:
    """Trials of a test: TUNESMITH_FAULT_TRIALS=full for the published sizes, a number for that many, else the CI subset."""
    asked = os.environ.get("TUNESMITH_FAULT_TRIALS", "")
    return full if asked == "full" else min(full, int(asked)) if asked else ci


def seed_of(name: str) -> int:
    """The seed of a test: TUNESMITH_FAULT_SEED repeats one that failed."""
    return int(os.environ.get("TUNESMITH_FAULT_SEED") or random.SystemRandom().randrange(10**6))


@dataclass(frozen=True)
class Ended:
    """How a trial ended; a negative code is the signal that killed it, None the timeout. Lists by rank."""

    codes: list[int | None]
    seconds: list[float | None]
    log: str
    sent: list[float] = field(default_factory=list)
    """When the signals were sent, in seconds from the start."""

    @property
    def code(self) -> int | None:
        """The code of rank 0."""
        return self.codes[0]

    @property
    def last_line(self) -> str:
        """The line that a person reads last."""
        lines = [line for line in self.log.splitlines() if line.startswith("tunesmith: ")]
        return lines[-1] if lines else self.log[-500:]


class Server:
    """A fork server; `run` is one trial."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        env = {**ENVIRONMENT, "PYTHONPATH": tests_first(), "PYTHONWARNINGS": "ignore"}
        env["BLANK_PICTURES"] = "" if FULL else "1"
        env.pop("TUNESMITH_FAULT", None)
        self.errors = (root / "server.log").open("wb")
        self.process = subprocess.Popen(
            [warm_python(), "-m", "faults.fork_server"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=env,
            text=True,
        )
        self.count = 0
        self._answer()

    def run(self, kind: str, options: dict[str, Any], **job: Any) -> Ended:
        """Runs one trial to its end."""
        self.count += 1
        log = self.root / f"trial-{self.count}.log"
        log.unlink(missing_ok=True)
        if job.get("ranks", 1) > 1:
            job["port"] = free_port()
        assert self.process.stdin is not None
        options = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
        print(
            json.dumps({"kind": kind, "options": options, "log": str(log), **job}), file=self.process.stdin, flush=True
        )
        answer = self._answer()
        text = log.read_text(errors="replace") if log.exists() else ""
        log.unlink(missing_ok=True)
        return Ended(answer["codes"], answer["seconds"], text, answer["sent"])

    def engine(self, folder: Path, *, fault: str | None = None, env: dict[str, str] | None = None, **job: Any) -> Ended:
        """One run of the engine in a folder. Options of the run are given as `options`."""
        options = {"folder": str(folder), "fault": fault, **job.pop("options", {})}
        return self.run("engine", options, env=env or {}, **job)

    def close(self) -> None:
        """Ends the server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=patient(30))
        self.process.stdout.close()
        self.errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server died: {(self.root / 'server.log').read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def tests_first() -> str:
    """A PYTHONPATH with this folder of tests before what is on it already."""
    return os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_folder(name: str, otherwise: Path) -> Path:
    """A fresh folder in /dev/shm (a kill sees the page cache either way, and fsync is quick there), or elsewhere."""
    shm = Path("/dev/shm")
    root = (shm if os.access(shm, os.W_OK) else otherwise) / f"tunesmith-faults-{os.getpid()}-{name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def fingerprint(folder: Path, *, outcome: bool = True) -> dict[str, Any]:
    """Everything that must repeat bit for bit: files of the last checkpoint, best/, model/; the journal without clocks."""
    run = RunDir(folder)
    last = run.checkpoints()[-1]
    found: dict[str, Any] = {}
    for part in (last, run.best, run.model):
        verify(part)
        found[part.name] = {n: e["sha256"] for n, e in read_manifest(part)["files"].items()}
    found["journal"] = lasting(run)
    if outcome:
        found["outcome"] = json.loads(Path(f"{folder}.outcome").read_text())
    return found


def lasting(run: RunDir) -> list[dict[str, Any]]:
    """The events of the experiment itself, without wall-clock fields."""
    kinds = (StepDone, Evaluated, RowsEvaluated, Improved, EpochStarted)
    return [
        {k: v for k, v in to_json(e).items() if k not in WALL_CLOCK}
        for e in read_journal(run.journal_file)
        if isinstance(e, kinds)
    ]


def intact_checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints that verify."""
    steps = []
    for path in RunDir(folder).checkpoints():
        try:
            steps.append(int(verify(path)["step"]))
        except CheckpointError:
            continue
    return steps


def damaged_checkpoints(folder: Path) -> list[str]:
    """Published folders that do not verify: after a kill there must be none."""
    run = RunDir(folder)
    bad = []
    for path in [*run.checkpoints(), run.best, run.model]:
        if path.exists():
            try:
                verify(path)
            except CheckpointError as error:
                bad.append(error.line())
    return bad


def leftovers(folder: Path) -> list[str]:
    """Names that a finished run must not leave behind."""
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(TMP_PREFIX))


def clean(folder: Path) -> None:
    """Removes a run and its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.outcome").unlink(missing_ok=True)
