"""The commands of `warm_python` are processes like those of python itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distributed.launching import alive
from patience import patient
from warm import ENVIRONMENT, warm_python

SHOW = "import os, sys; print(sys.argv, os.getcwd(), os.environ['X'], sys.stdin.read(), sys.path[0] == '')"
CASES: dict[str, list[str]] = {
    "code": ["-c", SHOW, "a", "é"],
    "exit": ["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"],
    "text": ["-c", "import sys; sys.exit('no')"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 15)"],
    "module": ["-m", "tunesmith", "scema"],
    "script": ["script.py", "b"],
    "threads and handlers": [
        "-c",
        "import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.1, print, ['first']).start()",
    ],
}


def run(python: str, folder: Path, *words: str, **more: str) -> Any:
    env = {**ENVIRONMENT, "X": "1", **more}
    done = subprocess.run(
        [python, *words], cwd=folder, env=env, input="in", capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_code_output_and_what_it_was_given_are_those_of_python(case: str, tmp_path: Path) -> None:
    text = "import sys\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\nprint(sys.argv, A(1), __file__)\n"
    (tmp_path / "script.py").write_text(text)
    assert run(warm_python(), tmp_path, *CASES[case]) == run(sys.executable, tmp_path, *CASES[case])


def test_a_traceback_ends_with_code_1(tmp_path: Path) -> None:
    code, out, err = run(warm_python(), tmp_path, "-c", "1 / 0")
    assert (code, out, err.splitlines()[-1]) == (1, "", "ZeroDivisionError: division by zero")


def test_what_libraries_read_while_they_are_imported_starts_a_cold_process(tmp_path: Path) -> None:
    words = ("-c", "import sys; print('torch' in sys.modules)")
    assert run(warm_python(), tmp_path, *words)[1] == "True\n"
    assert run(warm_python(), tmp_path, *words, HF_HOME=str(tmp_path))[1] == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_command_ends_its_process(number: int, tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [warm_python(), "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=patient(30)) in (-number, 1 if number == signal.SIGINT else None)
        until = time.monotonic() + patient(30)
        while alive([pid]) and time.monotonic() < until:
            os.sched_yield()
        assert alive([pid]) == []
