"""The second process of a command: it does jobs, tells how far they are, and never outlives the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tunesmith.pipeline.run_pages import load_pages

from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.probe import word_scores
from tunesmith.pipeline.results import draw_and_explain

JOBS = """
import os, sys, time
from tunesmith.errors import DataError

def where(*args):
    return os.getpid(), args

def tells(progress):
    progress("reading", 1, 2)
    return os.getpid()

def refuses():
    raise DataError("is wrong", where="rows.csv:3", fix="Mend it.")

def fails():
    raise KeyError("no error of ours")

def dies():
    if os.getpid() != COMMAND:
        os._exit(9)
    return "done here"

def gives_a_function():
    return lambda: 1

def sleeps(file):
    open(file, "w").write(str(os.getpid()))
    time.sleep(60)

COMMAND = os.getpid()
"""


def run(source: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs the lines in a process without torch, with the jobs as the module `jobs`."""
    (tmp_path / "jobs.py").write_text(JOBS)
    head = "import os, sys, jobs\nfrom tunesmith.cli.side_process import SideProcess\n"
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", head + source], capture_output=True, text=True, timeout=120, env=env)


needs_two_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="a second process helps on two cores"
)


@needs_two_cores
def test_jobs_are_done_by_another_process_which_is_gone_afterwards(tmp_path: Path) -> None:
    source = """
told = []
with SideProcess(["fractions"]) as aside:
    pid, args = aside.start(jobs.where, 1, "two")()
    assert pid != os.getpid() and args == (1, "two")
    assert "fractions" in sys.modules
    assert aside.start(jobs.tells, progress=lambda *what: told.append(what))() == pid
    assert told == [("reading", 1, 2)]
    aside.start(jobs.where, "not asked for")
    assert aside.start(jobs.where, "later")() == (pid, ("later",))
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("gone")
"""
    done = run(source, tmp_path)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


@needs_two_cores
def test_our_errors_come_back_whole_and_anything_else_is_done_here(tmp_path: Path) -> None:
    source = """
from tunesmith.errors import DataError
with SideProcess() as aside:
    try:
        aside.start(jobs.refuses)()
    except DataError as error:
        assert (error.exit_code, error.problem, error.where) == (3, "is wrong", "rows.csv:3")
        assert str(error) == "rows.csv:3: is wrong. Mend it."
        print("refused")
    try:
        aside.start(jobs.fails)()
    except KeyError as error:
        print("failed here")
    assert aside.start(jobs.gives_a_function)()() == 1
    assert aside.start(lambda: os.getpid())() == os.getpid()
    assert aside.start(jobs.dies)() == "done here"
    assert aside.start(jobs.where)() == (os.getpid(), ())
"""
    done = run(source, tmp_path)
    assert (done.returncode, done.stdout) == (0, "refused\nfailed here\n"), done.stderr


@needs_two_cores
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_a_command_that_is_killed_while_it_works(by: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (tmp_path / "jobs.py").write_text(JOBS)
    source = f"""
import jobs
from tunesmith.cli.side_process import SideProcess
with SideProcess() as aside:
    aside.start(jobs.sleeps, {str(note)!r})()
"""
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = subprocess.Popen([sys.executable, "-c", source], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "")
        pid = int(note.read_text())
        command.send_signal(by)
        assert command.wait(60) != 0
        wait_until(lambda: has_ended(pid))
    finally:
        command.kill()


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or waits to be reaped by whoever has adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true: object, seconds: float = 60) -> None:
    """Waits for a condition; an assertion after so many seconds."""
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_a_process_with_threads_or_torch_does_its_jobs_itself(tmp_path: Path) -> None:
    source = """
import threading
stay = threading.Event()
threading.Thread(target=stay.wait, daemon=True).start()
with SideProcess() as aside:
    assert aside.start(jobs.where)() == (os.getpid(), ())
"""
    done = run(source, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_the_other_process_does_needs_no_torch() -> None:
    modules = {job.__module__ for job in (word_scores, draw_and_explain, load_pages, read_run_data)}
    alone = f"import sys, {', '.join(sorted(modules))}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", alone], timeout=120).returncode == 0
