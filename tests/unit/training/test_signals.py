"""Signals: asked for once, obeyed at the right place, whatever library they fall into."""

from __future__ import annotations

import os
import signal

import pytest

from tunesmith.errors import DataError, StoppedBySignal
from tunesmith.training.stopping import Interrupted, StopRequest


def test_before_the_last_step_a_signal_only_asks() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(Interrupted):
            stop.interrupt()


def test_after_it_an_error_that_a_library_makes_of_the_signal_is_still_the_signal() -> None:
    def finish() -> None:
        with StopRequest() as stop:
            stop.raise_at_once()
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except StoppedBySignal as error:
                raise ValueError("could not determine the shape of an object") from error

    with pytest.raises(StoppedBySignal) as caught:
        finish()
    assert caught.value.exit_code == 130


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    def finish() -> None:
        with StopRequest() as stop:
            stop.raise_at_once()
            raise DataError("a bad row")

    with pytest.raises(DataError):
        finish()
