"""`tunesmith serve --workers 2` as real processes: a shared port and counters, killed workers replaced, clean shutdown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from patience import patient
from served_model import GOOD, KEY, make_sealed_run, post, send

ANSWERED = 'tunesmith_requests_total{route="/predict",status="200"} 10.0\n'


def children(pid: int) -> list[int]:
    """Return the workers, without the resource tracker of multiprocessing."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def get(port: int, path: str) -> tuple[int, str]:
    status, body = send(port, post(port, b"", path=path).replace(b"POST", b"GET", 1))
    return status, body.decode()


def until_ready(port: int) -> None:
    end = time.monotonic() + patient(60)
    while time.monotonic() < end:
        with suppress(OSError):  # no worker listens yet
            if get(port, "/ready")[0] == 200:
                return
        time.sleep(0.1)
    pytest.fail("not every worker has its model")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `tunesmith serve --workers 2`; return the process and its port."""
    run = make_sealed_run(tmp_path / "run", 0)
    words = [sys.executable, "-m", "tunesmith", "serve", str(run.path), "--port", "0", "--workers", "2"]
    process = subprocess.Popen(words, env={**os.environ, "TUNESMITH_SERVE_KEY": KEY}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        printed = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)/predict", printed)
        assert found is not None, printed
        until_ready(int(found[1]))
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + patient(30)
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_workers_share_a_port_and_dead_ones_are_replaced(service: tuple[subprocess.Popen[str], int]) -> None:
    process, port = service
    for _ in range(10):
        assert send(port, post(port, GOOD), patient(20))[0] == 200
    assert ANSWERED in get(port, "/metrics")[1], "the sum over both workers"
    first, second = children(process.pid)
    assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
    os.kill(first, signal.SIGKILL)
    until(lambda: first not in children(process.pid) and len(children(process.pid)) == 2, "the worker was not replaced")
    assert second in children(process.pid)
    until_ready(port)
    assert ANSWERED in get(port, "/metrics")[1], "the requests of the dead worker still count"
    workers = children(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patient(20)) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_workers_end_when_their_parent_is_killed(service: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = service
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    until(lambda: not any(is_alive(pid) for pid in workers), "a worker keeps running")


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
