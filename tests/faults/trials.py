"""Interrupt runs in forked children and compare them with the uninterrupted run. Doesn't import torch.

The children are forked from multiprocessing's fork server, which has imported torch (`preload.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from patience import patient
from tunesmith.errors import CheckpointError
from tunesmith.events import WALL_CLOCK, EpochStarted, Evaluated, Improved, RowsEvaluated, StepDone, to_json
from tunesmith.files import TMP_PREFIX
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import MANIFEST, RunDir, _own_hash, read_manifest, verify

FORKS = multiprocessing.get_context("forkserver")
NOBODY = 65534
SHORT = {"rows": 16, "epochs": 1, "evaluate_every": 2}
"""4 steps with two saves, one rotation, and the export."""


def size(full: int, ci: int) -> int:
    """Return the number of trials: `full` for `make faults` (TUNESMITH_FAULT_TRIALS=full), otherwise `ci`."""
    return full if os.environ.get("TUNESMITH_FAULT_TRIALS") == "full" else ci


def new_seed() -> int:
    """Return a random seed, or TUNESMITH_FAULT_SEED to repeat a failure."""
    return int(os.environ.get("TUNESMITH_FAULT_SEED") or random.SystemRandom().randrange(10**6))


@dataclass(frozen=True)
class Ended:
    """Exit codes of a trial, by rank; a negative code is the signal that killed it, None a timeout."""

    codes: list[int | None]
    seconds: list[float]
    log: str
    sent: list[float] = field(default_factory=list)
    """Times of the signals in seconds from the start."""
    peak: int = 0
    """Peak resident memory in bytes, if the process was not killed."""

    @property
    def code(self) -> int | None:
        """Return the exit code of rank 0."""
        return self.codes[0]

    @property
    def last_line(self) -> str:
        """Return the last line of the output."""
        lines = [line for line in self.log.splitlines() if line.startswith("tunesmith: ")]
        return lines[-1] if lines else self.log[-500:]


@dataclass
class Job:
    """A trial and its faults.

    `target` is "module:function"; it is called with `options` and returns the exit code. `signals` are (seconds, name, rank) from
    the start, or from the creation of the file `signals_after`. `strace` contains arguments of strace.
    """

    target: str
    options: Any
    env: dict[str, str] = field(default_factory=dict)
    signals: list[Any] = field(default_factory=list)
    signals_after: Path | None = None
    strace: list[str] = field(default_factory=list)
    strace_log: Path = Path(os.devnull)
    fsize: int = 0
    memory: int = 0
    uid: int = 0
    cwd: Path = Path("/")
    ranks: int = 1
    until_rank_0_ends: bool = False
    """Kill the other ranks when rank 0 has ended: one of them is stopped."""
    timeout: float = 60
    log: str = ""


def run(target: str, options: Any, **job: Any) -> Ended:
    """Run one trial."""
    start_server()
    with tempfile.NamedTemporaryFile() as log:
        return run_job(Job(target, options, log=log.name, **job))


def engine(folder: Path, *, fault: str | None = None, options: dict[str, Any] | None = None, **job: Any) -> Ended:
    """Run the engine in a folder, without the command line."""
    given = {"folder": str(folder), "fault": fault, **(options or {})}
    return run("faults.engine_trial:main", given, **job)


def cli(*words: str, **job: Any) -> Ended:
    """Run a command in a forked child."""
    return run("tunesmith.cli.main:main", list(words), **job)


def run_killed(command: list[str], function: str, call: int) -> None:
    """Run a command that is killed (SIGKILL) at this call of a function, such as `package.module:Class.method`."""
    ended = run("faults.trials:kill_in_call", (command, function, call), timeout=120)
    assert ended.code == -signal.SIGKILL, ended.log[-1000:]


def kill_in_call(given: tuple[list[str], str, int]) -> int:
    """Run a command in this process, which ends at the n-th call of a function."""
    command, function, call = given
    module, _, name = function.partition(":")
    *outer, last = name.split(".")
    home = reduce(getattr, outer, importlib.import_module(module))
    real, calls = getattr(home, last), count(1)

    def kill_or_call(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(home, last, kill_or_call)
    code: int = importlib.import_module("tunesmith.cli.main").main(command)
    return code


def start_server() -> None:
    """Start the fork server of this process, once."""
    if forkserver._forkserver._forkserver_pid is not None:
        return
    FORKS.set_forkserver_preload(["faults.preload"])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONWARNINGS", "TUNESMITH_FAULT")}
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), PYTHONWARNINGS="ignore")
    os.environ.pop("TUNESMITH_FAULT", None)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def run_job(job: Job) -> Ended:
    """Fork, trace, send signals, and wait."""
    port = str(free_port()) if job.ranks > 1 else ""
    pipes, processes = [], []
    for rank in range(job.ranks):
        mine, theirs = FORKS.Pipe()
        process = FORKS.Process(target=be_child, args=(job, rank, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    tracer = attach(processes[0].pid or 0, job) if job.strace else None
    started = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    codes: list[int | None] = [None] * job.ranks
    seconds, sent, todo = [0.0] * job.ranks, [], sorted(job.signals)
    clock = None if job.signals_after else started
    until = started + patient(job.timeout)
    while None in (codes[:1] if job.until_rank_0_ends else codes) and (now := time.monotonic()) < until:
        if clock is None and job.signals_after is not None and job.signals_after.exists():
            clock = now
        while todo and clock is not None and todo[0][0] <= now - clock:
            _, name, *rank = todo.pop(0)
            sent.append(now - started)
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank[0] if rank else 0].pid or 0, getattr(signal, f"SIG{name}"))
        for index, process in enumerate(processes):
            if codes[index] is None and process.exitcode is not None:
                codes[index], seconds[index] = process.exitcode, time.monotonic() - started
        time.sleep(0.002)
    peak = 0
    for pipe, process in zip(pipes, processes, strict=True):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        with contextlib.suppress(EOFError, ConnectionError):
            peak = max(peak, pipe.recv())
        pipe.close()
        process.close()
    if tracer is not None:
        tracer.communicate(timeout=patient(20))
    return Ended(codes, seconds, Path(job.log).read_text(errors="replace"), sent, peak)


def attach(pid: int, job: Job) -> subprocess.Popen[bytes]:
    """Attach strace to a waiting child."""
    words = ["strace", "-f", "-qq", "-o", str(job.strace_log), *job.strace, "-p", str(pid)]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE)
    until = time.monotonic() + patient(10)
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"strace did not attach: {tracer.communicate()}")
        time.sleep(0.002)
    time.sleep(0.01)
    return tracer


def be_child(job: Job, rank: int, port: str, pipe: Any) -> None:
    """Set limits, wait for the start, run the target and exit."""
    code = 99
    try:
        os.setpgid(0, 0)
        log = os.open(job.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job.cwd)
        os.environ.update(job.env)
        tempfile.tempdir = None
        if job.ranks > 1:
            world = str(job.ranks)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true")
        if job.fsize:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job.fsize, job.fsize))
        if job.memory:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + job.memory, used + job.memory))
        if job.uid:
            os.setgroups([])
            os.setgid(job.uid)
            os.setuid(job.uid)
        module, _, name = job.target.partition(":")
        function = getattr(importlib.import_module(module), name)
        pipe.send("ready")
        pipe.recv()
        code = function(job.options)
        if not job.strace:  # an injected fault must not hit this write
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_folder(name: str, otherwise: Path) -> Path:
    """Return a new folder in /dev/shm, where fsync is fast and kills have the same effect, or elsewhere."""
    shm = Path("/dev/shm")
    root = (shm if os.access(shm, os.W_OK) else otherwise) / f"tunesmith-faults-{os.getpid()}-{name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def fingerprint(folder: Path, *, outcome: bool = True) -> dict[str, Any]:
    """Return everything that must be bit-identical: the last and the best checkpoint, model/, and the event log without times."""
    run = RunDir(folder)
    last = run.checkpoints()[-1]
    found: dict[str, Any] = {}
    best = run.checkpoint(json.loads((last / "state.json").read_text())["progress"]["step"])
    for part in (last, best, run.model):
        verify(part)
        found[part.name] = {n: e["sha256"] for n, e in read_manifest(part)["files"].items()}
    found["journal"] = lasting(run)
    if outcome:
        found["outcome"] = json.loads(Path(f"{folder}.outcome").read_text())
    return found


def lasting(run: RunDir) -> list[dict[str, Any]]:
    """Return the events of the experiment without times."""
    kinds = (StepDone, Evaluated, RowsEvaluated, Improved, EpochStarted)
    return [
        {k: v for k, v in to_json(e).items() if k not in WALL_CLOCK}
        for e in read_journal(run.journal_file)
        if isinstance(e, kinds)
    ]


def intact_checkpoints(folder: Path) -> list[int]:
    """Return the steps of valid checkpoints."""
    steps = []
    for path in RunDir(folder).checkpoints():
        try:
            steps.append(int(verify(path)["step"]))
        except CheckpointError:
            continue
    return steps


def damaged_checkpoints(folder: Path) -> list[str]:
    """Return published folders that don't verify; after a kill there must be none."""
    run = RunDir(folder)
    bad = []
    for path in [*run.checkpoints(), run.model]:
        if path.exists():
            try:
                verify(path)
            except CheckpointError as error:
                bad.append(error.line())
    return bad


def leftovers(folder: Path) -> list[str]:
    """Return names that a finished run must not leave."""
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(TMP_PREFIX))


def clean(folder: Path) -> None:
    """Remove a run and its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.outcome").unlink(missing_ok=True)


def rewrite_manifest(folder: Path) -> None:
    """Make the manifest match the files that are left."""
    manifest = read_manifest(folder)
    manifest["files"] = {
        p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in folder.iterdir()
        if p.name != MANIFEST
    }
    manifest["self"] = _own_hash(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
