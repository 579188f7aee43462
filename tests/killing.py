"""Commands that kill themselves (SIGKILL) at the n-th call of a function."""

from __future__ import annotations

import signal
import subprocess
import sys

from patience import patient

SCRIPT = """
import os, signal, sys
from importlib import import_module

module, _, name = sys.argv[1].partition(":")
home = import_module(module)
*outer, last = name.split(".")
for part in outer:
    home = getattr(home, part)
real, left = getattr(home, last), [int(sys.argv[2])]


def kill_or_call(*args, **options):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)


setattr(home, last, kill_or_call)
from tunesmith.cli.main import main

sys.exit(main(sys.argv[3:]))
"""


def run_killed(command: list[str], function: str, call: int) -> None:
    """Run a `tunesmith` command that is killed at this call of a function, such as `package.module:Class.method`."""
    words = [sys.executable, "-c", SCRIPT, function, str(call), *command]
    ended = subprocess.run(words, capture_output=True, check=False, timeout=patient(120), stdin=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-1000:]
