"""Runs trials in forked children: torch and transformers are imported once, a trial costs about a second.

Reads one JSON job a line on stdin, answers one JSON line. Started by `trials.Server`; never by hand.
A job: kind (engine, cli, peer, model, load), options, env, log, signals [[seconds, name, rank]], signals_after,
strace (arguments), strace_log, fsize, uid, ranks, timeout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from patience import patient


def import_all() -> None:
    """All that a trial needs, before the first fork and without starting a thread; nothing new in a fork of `warm.py`."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    import accelerate  # noqa: F401
    from transformers import BertForSequenceClassification  # noqa: F401

    import warm
    from faults import engine_trial, peer_trial  # noqa: F401

    warm.import_all()
    engine_trial.warm_up()
    gc.collect()
    gc.freeze()  # a collection in a child does not touch, and so copy, the pages of all modules


def run_kind(kind: str, options: dict[str, Any]) -> int:
    """Runs the work of a trial in this process; gives its exit code."""
    if kind == "engine":
        from faults import engine_trial

        return engine_trial.main(options)
    if kind == "model":
        from faults import engine_trial

        engine_trial.write_model(Path(options["folder"]))
        return 0
    if kind == "load":
        from faults import engine_trial

        return engine_trial.load_folder(options["folder"], options["text"])
    if kind == "peer":
        from faults import peer_trial

        return peer_trial.main(options)
    from tunesmith.cli.main import main

    return main(options["argv"])


def child(job: dict[str, Any], rank: int, gate: int, started: int) -> None:
    """Waits for the gate, runs, leaves. Never comes back."""
    code = 99
    try:
        os.setpgid(0, 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.environ.update(job.get("env", {}))
        if job.get("ranks", 1) > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **rank_environment(job))
        if job.get("fsize"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], job["fsize"]))
        if job.get("uid"):
            os.setgroups([])
            os.setgid(job["uid"])
            os.setuid(job["uid"])
        os.close(started)
        os.read(gate, 1)
        code = run_kind(job["kind"], job["options"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def rank_environment(job: dict[str, Any]) -> dict[str, str]:
    """What torchrun would set."""
    world = str(job["ranks"])
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        "ACCELERATE_USE_CPU": "true",
    }


def attach(pids: list[int], job: dict[str, Any]) -> subprocess.Popen[bytes] | None:
    """strace on a waiting child; comes back once it has hold of it."""
    if not job.get("strace"):
        return None
    words = ["strace", "-f", "-qq", "-o", job.get("strace_log", os.devnull), *job["strace"], "-p", str(pids[0])]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE)
    until = time.monotonic() + patient(10)
    while "TracerPid:\t0" in Path(f"/proc/{pids[0]}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"strace did not attach: {tracer.stderr.read() if tracer.stderr else ''!r}")
        time.sleep(0.002)
    time.sleep(0.01)
    return tracer


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Forks, injects, waits; gives exit codes (negative: the signal that ended it) and seconds, by rank."""
    gate_read, gate = os.pipe()
    ready, ready_write = os.pipe()
    pids = []
    for rank in range(job.get("ranks", 1)):
        pid = os.fork()
        if pid == 0:
            os.close(gate)
            os.close(ready)
            child(job, rank, gate_read, ready_write)
        pids.append(pid)
    os.close(gate_read)
    os.close(ready_write)
    os.read(ready, 1)  # end of file: every child has closed its end and waits at the gate
    os.close(ready)
    tracer = attach(pids, job)
    started = time.monotonic()
    os.write(gate, b"g" * len(pids))
    os.close(gate)
    codes, seconds, sent = wait_for(pids, job, started)
    if tracer is not None:
        tracer.wait(timeout=patient(20))
        if tracer.stderr:
            tracer.stderr.close()
    return {"codes": codes, "seconds": seconds, "sent": sent}


def wait_for(
    pids: list[int], job: dict[str, Any], started: float
) -> tuple[list[int | None], list[float | None], list[float]]:
    """Sends the job's signals at their times and collects the children; those left at the timeout have the code None.

    The times count from the start, or from when the file `signals_after` is there. Gives codes, seconds, times of signals.
    """
    sent: list[float] = []
    clock = None if "signals_after" in job else started
    codes: list[int | None] = [None] * len(pids)
    seconds: list[float | None] = [None] * len(pids)
    todo = sorted(job.get("signals", []))
    until = started + patient(job.get("timeout", 60))
    while None in codes and time.monotonic() < until:
        now = time.monotonic()
        if clock is None and Path(job["signals_after"]).exists():
            clock = now
        while todo and clock is not None and todo[0][0] <= now - clock:
            _, name, *rank = todo.pop(0)
            sent.append(now - started)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank[0] if rank else 0], getattr(signal, f"SIG{name}"))
        for index, pid in enumerate(pids):
            if codes[index] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[index] = os.waitstatus_to_exitcode(status)
                    seconds[index] = time.monotonic() - started
        time.sleep(0.001)
    for index, pid in enumerate(pids):
        if codes[index] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes, seconds, sent


def serve() -> None:
    """Answers jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = run_job(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
