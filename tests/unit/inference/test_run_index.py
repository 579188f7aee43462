"""A run is running while its lock is held, and only the process that holds it is ever signalled."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.errors import ResourceError
from tunesmith.inference.live_runs import RunIndex, is_running, status_of, stop_run
from tunesmith.inference.security import load_token
from tunesmith.runs.folder import RunDir

HOLD = """
import signal, sys, time
from pathlib import Path
from tunesmith.runs.lock import RunLock
signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_held_lock_means_running_and_stop_reaches_its_holder(tmp_path: Path, holder) -> None:
    run = RunDir(tmp_path)
    assert is_running(run)
    assert status_of(run, None, 0.0) == "running"
    assert stop_run(run).pid == holder.pid
    assert holder.wait(timeout=10) == 143
    assert not is_running(run)
    assert status_of(run, "SIGTERM", 0.0) == status_of(run, "signal 15", 0.0) == "stopped"
    with pytest.raises(ResourceError, match="not being trained"):
        stop_run(run)


def test_a_lock_file_that_names_another_process_stops_nobody(tmp_path: Path, holder) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / ".lock").write_text(json.dumps({"pid": victim.pid, "host": socket.gethostname()}))
        with pytest.raises(ResourceError, match="does not hold it"):
            stop_run(RunDir(tmp_path))
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.parametrize("pid", [0, 1, -1, os.getpid()], ids=["everything", "init", "all", "own"])
def test_no_lock_file_can_aim_at_everything_at_init_or_at_the_board(tmp_path: Path, holder, pid: int) -> None:
    (tmp_path / ".lock").write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
    with pytest.raises(ResourceError, match="cannot be stopped"):
        stop_run(RunDir(tmp_path))
    assert holder.poll() is None


def test_a_run_of_another_machine_is_not_stopped_from_here(tmp_path: Path, holder) -> None:
    (tmp_path / ".lock").write_text(json.dumps({"pid": holder.pid, "host": "elsewhere"}))
    with pytest.raises(ResourceError, match="on elsewhere"):
        stop_run(RunDir(tmp_path))
    assert holder.poll() is None


def test_a_linked_lock_file_is_not_followed(tmp_path: Path, holder) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".lock").symlink_to(tmp_path / ".lock")
    assert not is_running(RunDir(other))
    with pytest.raises(ResourceError):
        stop_run(RunDir(other))
    assert holder.poll() is None


def test_the_index_finds_new_runs_and_forgets_removed_ones(runs: Path, synthetic) -> None:
    index = RunIndex(runs)
    assert {row.id for row in index.rows()} == {"alpha", "beta"}
    synthetic.make_folder(runs / "gamma", synthetic.make_run([0.5], [0.5], steps_per_epoch=5), rows=12)
    assert {row.id for row in index.rows()} == {"alpha", "beta", "gamma"}
    (runs / "gamma" / "journal.jsonl").unlink()
    assert {row.id for row in index.rows()} == {"alpha", "beta"}
    assert {row.id for row in RunIndex(runs / "alpha").rows()} == {"alpha"}


def test_a_row_says_what_the_folder_says(runs: Path) -> None:
    (runs / "alpha" / "metrics.json").write_text(
        '{"validation": {"loss": {"value": 0.4}, "f1": {"value": 0.9, "low": 0.8, "high": 0.95}}}'
    )
    row = next(row for row in RunIndex(runs).rows() if row.id == "alpha")
    assert (row.name, row.model, row.status) == ("mrpc-bert-base", "bert-base-uncased", "finished")
    assert row.score == ("validation f1", 0.9, 0.8, 0.95)
    assert (row.peek.step, row.peek.num_steps) == (60, 60)


def test_the_token_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    token = load_token(file)
    assert len(token) >= 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_token(file) == token
    assert load_token(file, new=True) != token
    kept = load_token(file)
    file.chmod(0o644)
    assert load_token(file) != kept, "a token that others could read is not a secret any more"
    target = tmp_path / "elsewhere"
    target.write_text("e" * 43)
    file.unlink()
    file.symlink_to(target)
    assert load_token(file) != "e" * 43
    assert target.read_text() == "e" * 43
