"""Run a script in the test process, as `python FILE WORDS` would: a new process takes seconds to import torch."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock


def run_script(file: Path, *words: str) -> str:
    """Run a script and return its stdout; raise its exceptions."""
    out = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        mock.patch.object(sys, "argv", [str(file), *words]),
    ):
        warnings.simplefilter("ignore")
        runpy.run_path(str(file), run_name="__main__")
    return out.getvalue()
