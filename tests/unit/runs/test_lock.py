"""One run a folder; whoever only looks whether it is in use stops nobody from starting."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import ResourceError
from tunesmith.runs import lock as ownership
from tunesmith.runs.lock import RunLock, read_holder


def test_a_run_that_starts_while_another_program_looks_at_the_lock_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lock"
    file.touch()
    reader = os.open(file, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    real, refused = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        try:
            real(descriptor, how)
        except BlockingIOError:
            refused.append(how)
            real(reader, fcntl.LOCK_UN)  # the reader has seen enough, just then
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(file):
        assert refused == [fcntl.LOCK_EX | fcntl.LOCK_NB]
        assert f"process {os.getpid()}" in str(read_holder(file))
    os.close(reader)


@pytest.mark.parametrize("holder", ["run", "reader"])
def test_a_folder_in_use_is_refused_and_a_reader_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any
) -> None:
    monkeypatch.setattr(ownership, "READERS_SECONDS", 0.0)
    file = tmp_path / "lock"
    file.touch()
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX if holder == "run" else fcntl.LOCK_SH)
    with pytest.raises(ResourceError, match="in use"), RunLock(file):
        pass
    os.close(descriptor)
