"""A signal after the last step ends the run with the exit code of the signal, even if a library catches the exception."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tunesmith.errors import StoppedBySignal
from tunesmith.training.stopping import StopRequest


def test_signal_after_last_step_is_raised_when_a_library_catches_it() -> None:
    def finish() -> None:
        with StopRequest() as stop:
            stop.raise_at_once()
            with contextlib.suppress(Exception):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StoppedBySignal) as stopped:
        finish()
    assert stopped.value.exit_code == 130
