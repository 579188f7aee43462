"""Several processes that answer at one port, each with a model of its own, one that keeps them alive, and what all of them count
in the text format that Prometheus reads.

Every worker listens on a socket of its own with SO_REUSEPORT: the kernel spreads the connections. With one shared socket, the
first of them to wake would take all that wait.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tunesmith.inference.server import raise_stopped

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of answer times."""
STATUSES = (200, 400, 408, 409, 413, 415, 422, 429, 500, 503)
ROUTES = ("/predict", "/health", "/ready", "/info", "/metrics", "/openapi.json", "/docs")
_REQUESTS = {(route, status): place for place, (route, status) in enumerate((r, s) for r in ROUTES for s in STATUSES)}
_BUCKETS = len(_REQUESTS)
_SECONDS, _ROWS, _RELOADS, _WAITING, _READY = range(_BUCKETS + len(SECONDS) + 1, _BUCKETS + len(SECONDS) + 6)
_COLUMNS = _READY + 1


def make_table(workers: int) -> int:
    """A file descriptor of shared memory, all zeros, with a row for each worker."""
    table = os.memfd_create("tunesmith-counters", 0)
    os.ftruncate(table, workers * _COLUMNS * 8)
    return table


class ServiceCounters:
    """Requests by route and status, their seconds, rows; any thread may count. A worker writes its own row and reads all."""

    def __init__(self, table: int | None = None, worker: int = 0) -> None:
        size = _COLUMNS * 8 if table is None else os.fstat(table).st_size
        self._all = np.frombuffer(mmap.mmap(-1 if table is None else table, size)).reshape(-1, _COLUMNS)
        self._mine = self._all[worker]
        self._mine[[_WAITING, _READY]] = 0  # of a worker that died in this place
        self._lock = threading.Lock()

    def count_request(self, route: str, status: int, seconds: float, rows: int = 0) -> None:
        """One answered request."""
        with self._lock:
            self._mine[_REQUESTS.get((route, status), _REQUESTS[route, 500])] += 1
            if route == "/predict" and status == 200:
                self._mine[_BUCKETS + sum(seconds > bound for bound in SECONDS)] += 1
                self._mine[_SECONDS] += seconds
                self._mine[_ROWS] += rows

    def count_reload(self) -> None:
        """The model was replaced."""
        with self._lock:
            self._mine[_RELOADS] += 1

    def note(self, *, waiting: int | None = None, ready: bool | None = None) -> None:
        """The state of this worker."""
        for place, value in ((_WAITING, waiting), (_READY, ready)):
            if value is not None:
                self._mine[place] = value

    @property
    def ready(self) -> bool:
        """Whether every worker has its model."""
        return bool(self._all[:, _READY].all())

    def text(self) -> str:
        """All counters, summed over the workers."""
        sums: Sequence[float] = self._all.sum(axis=0).tolist()
        lines = ["# TYPE tunesmith_requests_total counter"]
        lines += [
            f'tunesmith_requests_total{{route="{route}",status="{status}"}} {sums[place]:.0f}'
            for (route, status), place in _REQUESTS.items()
            if sums[place]
        ]
        lines.append("# TYPE tunesmith_predict_seconds histogram")
        total = 0.0
        for place, bound in enumerate((*map(str, SECONDS), "+Inf"), _BUCKETS):
            total += sums[place]
            lines.append(f'tunesmith_predict_seconds_bucket{{le="{bound}"}} {total:.0f}')
        lines += [f"tunesmith_predict_seconds_sum {sums[_SECONDS]:.6f}", f"tunesmith_predict_seconds_count {total:.0f}"]
        for name, place in {"rows_total": _ROWS, "reloads_total": _RELOADS}.items():
            lines += [f"# TYPE tunesmith_{name} counter", f"tunesmith_{name} {sums[place]:.0f}"]
        gauges = {"waiting_requests": sums[_WAITING], "ready": int(self.ready), "workers": len(self._all)}
        for name, value in gauges.items():
            lines += [f"# TYPE tunesmith_{name} gauge", f"tunesmith_{name} {value:.0f}"]
        return "\n".join(lines) + "\n"


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
