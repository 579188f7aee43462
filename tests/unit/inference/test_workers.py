"""`tunesmith serve --workers 2` as real processes: one port, one sum of counters, a killed worker replaced, a clean end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from faults.serve_requests import GOOD, KEY, post, send
from patience import patient
from tunesmith.runs.manifest import seal
from unit.inference.test_prediction import make_run

ANSWERED = 'tunesmith_requests_total{route="/predict",status="200"} 10\n'


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def get(port: int, path: str) -> tuple[int, str]:
    status, body = send(port, post(port, b"", path=path).replace(b"POST", b"GET", 1))
    return status, body.decode()


def until_ready(port: int) -> None:
    end = time.monotonic() + patient(60)
    while time.monotonic() < end:
        with suppress(OSError):  # none of them listens yet
            if get(port, "/ready")[0] == 200:
                return
        time.sleep(0.1)
    pytest.fail("not every worker has its model")


def test_two_workers_share_a_port_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0)
    run.journal_file.touch()
    seal(run.model, {"kind": "model"}, {})
    words = [sys.executable, "-m", "tunesmith", "serve", str(run.path), "--port", "0", "--workers", "2"]
    service = subprocess.Popen(words, env={**os.environ, "TUNESMITH_SERVE_KEY": KEY}, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    try:
        found = re.search(r"127\.0\.0\.1:(\d+)/predict", service.stdout.readline())
        assert found is not None
        port = int(found[1])
        until_ready(port)
        for _ in range(10):
            assert send(port, post(port, GOOD), patient(20))[0] == 200
        assert ANSWERED in get(port, "/metrics")[1], "the sum over both workers"
        first, second = children(service.pid)
        assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + patient(20)
        while first in children(service.pid) or len(children(service.pid)) < 2:
            assert time.monotonic() < end, "the worker was not replaced"
            time.sleep(0.05)
        assert second in children(service.pid)
        until_ready(port)
        assert ANSWERED in get(port, "/metrics")[1], "what the dead worker counted stays"
        workers = children(service.pid)
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=patient(20)) == 143
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        service.kill()
        service.wait()
        service.stdout.close()
