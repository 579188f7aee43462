"""One fork server for all fault tests of a session, and the unbroken run that broken ones are compared with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.trials import Server, clean, fingerprint, memory_folder


@dataclass
class Bench:
    """`server` runs trials below `root`; `whole` is the fingerprint of the unbroken run that took `seconds`."""

    server: Server
    root: Path
    whole: dict[str, Any]
    seconds: float

    def seconds_now(self) -> float:
        """How long the unbroken run takes with what else runs on the machine now."""
        ended = self.server.engine(self.root / "timed")
        clean(self.root / "timed")
        return float(ended.seconds[0] or 0)

    def same_as_whole(self, folder: Path, **options: Any) -> None:
        """Resumes the run and asserts that it ends bit for bit like the unbroken one."""
        ended = self.server.engine(folder, options=options)
        assert ended.code == 0, ended.log[-2000:]
        assert fingerprint(folder) == self.whole


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = memory_folder("engine", tmp_path_factory.mktemp("faults"))
    server = Server(root)
    try:
        server.engine(root / "warm")
        clean(root / "warm")
        ended = server.engine(root / "whole")
        assert ended.code == 0, ended.log
        yield Bench(server, root, fingerprint(root / "whole"), float(ended.seconds[0] or 0))
    finally:
        server.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def folder(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A run folder that is removed afterwards."""
    path = bench.root / f"run-{os.getpid()}-{abs(hash(request.node.nodeid))}"
    yield path
    clean(path)
