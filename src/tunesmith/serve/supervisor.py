"""Several processes that answer at one port, each with a model of its own, and one that keeps them alive.

Every worker listens on a socket of its own with SO_REUSEPORT: the kernel spreads the connections. With one shared socket, the
first of them to wake would take all that wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tunesmith.serve.counters import make_table
from tunesmith.serve.server import raise_stopped

LOOK_SECONDS = 0.2
BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM)
Start = Callable[[int, int], list[str]]
"""The words of the command for a worker, from its number and the table of counters (a file descriptor)."""


def run_workers(count: int, words: Start, environment: dict[str, str], drain_seconds: float) -> int:
    """Keeps `count` workers alive until SIGINT or SIGTERM, then waits for the requests they accepted; returns the exit code.

    A worker that a signal ended (out of memory, a crash of a library) is started again. One that exits has a reason that
    holds for all of them: its exit code is that of the service.
    """
    table = make_table(count)
    stopping = threading.Event()
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        stopping.set()

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)

    def start(worker: int) -> subprocess.Popen[bytes]:
        # Its end of the pipe closes with this process, however it ends; a group of its own, so that Ctrl-C comes from here.
        return subprocess.Popen(
            [sys.executable, "-m", "tunesmith", *words(worker, table)],
            stdin=subprocess.PIPE,
            pass_fds=[table],
            env=environment,
            process_group=0,
        )

    workers = [start(number) for number in range(count)]
    code = 0
    while not code and not stopping.wait(LOOK_SECONDS):
        for number, worker in enumerate(workers):
            ended = worker.poll()
            if ended is not None and (ended < 0 or ended in BY_SIGNAL):
                workers[number] = start(number)
            elif ended is not None:
                code = ended or 1
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + drain_seconds
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    os.close(table)
    if asked:
        raise_stopped(asked[0])
    return code


def end_with_parent() -> None:
    """Ends this worker as SIGTERM does when the process that started it is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="tunesmith-parent", daemon=True).start()
