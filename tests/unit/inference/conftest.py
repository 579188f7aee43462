"""A board and a prediction service on a loopback socket, with known run folders."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import synthetic_runs
from tunesmith.errors import DataError
from tunesmith.inference.board import Board
from tunesmith.inference.server import Listen, make_server, open_socket
from tunesmith.inference.service import Batcher, LiveModel, PredictionService
from tunesmith.labels import LabelMap
from tunesmith.runs.folder import RunDir, write_manifest

TOKEN = "t" * 43


class FakeModel:
    """Model that predicts the length of a text; "panic" raises an exception like a Rust tokenizer's panic."""

    def __init__(self, columns: tuple[str, ...] = ("text",)) -> None:
        self.facts = SimpleNamespace(text_columns=columns, labels=LabelMap.for_classes(["short", "long"]))
        self.batches: list[int] = []
        self.wait = threading.Event()
        self.wait.set()

    def logits(self, texts: list[str], pairs: list[str] | None) -> Any:
        if pairs is not None:
            raise DataError("this model expects one text")
        self.wait.wait(20)
        self.batches.append(len(texts))
        if any("panic" in text for text in texts):
            raise BaseException("PanicException")
        share = np.array([min(len(t), 100) / 100 for t in texts])
        return np.log(np.clip(np.stack([1 - share, share], axis=1), 1e-9, None))


@dataclass
class Served:
    """A running server; by default, `ask` sends the token and the correct origin."""

    port: int
    service: Any
    model: FakeModel
    root: Path

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def good(self) -> dict[str, str]:
        return {"Host": f"127.0.0.1:{self.port}", "Cookie": f"tunesmith-{self.port}={TOKEN}", "Origin": self.origin}

    def ask(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body; of a stream, only the beginning."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in (self.good() if headers is None else headers).items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            reply = connection.getresponse()
            found = {k.lower(): v for k, v in reply.getheaders()}
            stream = found.get("content-type", "").startswith("text/event-stream") and method == "GET"
            return reply.status, found, reply.read1(65536) if stream else reply.read()
        finally:
            connection.close()

    def post(self, path: str, data: Any, **more: str) -> tuple[int, Any]:
        """Return status and JSON of a valid POST."""
        headers = self.good() | {"Content-Type": "application/json"} | more
        status, _, body = self.ask("POST", path, headers=headers, body=json.dumps(data).encode())
        return status, json.loads(body)


def serve(root: Path, made: Any, model: Any = None) -> Iterator[Served]:
    listener = open_socket("127.0.0.1", 0)
    server = make_server(made, listener, Listen("127.0.0.1", 0, TOKEN))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    with mock.patch(
        "tunesmith.inference.server.ARRIVED_SECONDS", 0.0
    ):  # no clients are left; test_workers.py tests draining
        thread.start()
        end = time.monotonic() + 10
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield Served(listener.getsockname()[1], made, model, root)
        finally:
            server.should_exit = True
            thread.join(timeout=15)
            listener.close()
            assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def served(runs: Path) -> Iterator[Served]:
    """Start a board for `runs`."""
    yield from serve(runs, Board(runs))


@pytest.fixture
def fake() -> FakeModel:
    """Return the model of `service`."""
    return FakeModel()


@pytest.fixture
def service(runs: Path, fake: FakeModel) -> Iterator[Served]:
    """Start a prediction service with a short queue."""
    batcher = Batcher(LiveModel(RunDir(runs / "alpha").model, lambda folder: fake), max_waiting=8)
    yield from serve(runs, PredictionService(runs / "alpha", batcher), fake)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a board that all tests of a file share; they must not change its runs."""
    root = make_runs(tmp_path_factory.mktemp("board"))
    yield from serve(root, Board(root))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return the folder with the runs of `served`."""
    return make_runs(tmp_path)


def make_runs(tmp_path: Path) -> Path:
    """Write two finished runs, one with a model folder, and secrets next to them."""
    root = tmp_path / "runs"
    events = synthetic_runs.make_run(
        [0.5, 0.3, 0.15], [0.45, 0.40, 0.46], accuracy=[0.78, 0.85, 0.86], steps_per_epoch=20
    )
    for name in ("alpha", "beta"):
        synthetic_runs.make_folder(root / name, events, rows=40)
    model = RunDir(root / "alpha").model
    model.mkdir()
    facts = {"text_columns": ["text"], "labels": {"names": ["short", "long"], "task": "binary"}}
    facts |= dict.fromkeys(("label_column", "max_length", "metrics"))
    (model / "tunesmith.json").write_text(json.dumps(facts))
    write_manifest(model, {"kind": "model"})
    (tmp_path / "secret.txt").write_text("SECRET")
    (root / "secret.txt").write_text("SECRET")
    return root
