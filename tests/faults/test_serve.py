"""The prediction service as a real process under hostile requests, replaced models and SIGTERM, in small.

At their published sizes: `python tests/faults/serve_requests.py RUN` and `python tests/faults/serve_stops.py RUN OTHER_RUN`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.serve_requests import throw
from faults.serve_stops import Service
from patience import patient
from served_model import make_sealed_run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_sealed_run(tmp_path_factory.mktemp("runs") / f"run-{seed}", seed).path for seed in (0, 1)]


def test_hostile_requests_are_refused_and_good_ones_between_them_answered(runs: list[Path]) -> None:
    service = Service(runs[0], 1)
    try:
        found = throw(service.port, 0, 200)
        assert service.process.poll() is None
    finally:
        code = service.end()
    assert code == 143
    assert found.total() == 200
    assert [status for status in found if status >= 500 and status != 503] == []
    assert {400, 401, 422} <= found.keys()


def test_a_replaced_model_and_sigterm_under_load_lose_no_request(runs: list[Path]) -> None:
    words = [sys.executable, str(HERE / "serve_stops.py"), *map(str, runs), "--times", "1"]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=patient(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'exit 143': 1" in done.stdout
