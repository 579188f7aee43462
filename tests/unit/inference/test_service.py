"""The prediction service for operators and clients: bodies, limits, counters, keys, reload and shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from served_model import make_run
from tunesmith.errors import ConfigError
from tunesmith.inference import service as service_module
from tunesmith.inference.server import key_file, token_file
from tunesmith.inference.service import (
    Batcher,
    LiveModel,
    PredictionService,
    Texts,
    load_on_cpu,
)
from tunesmith.inference.tables import Prediction
from tunesmith.runs.folder import RunDir


def test_scores_are_sorted_and_limited_to_top_k(service: Any) -> None:
    long = "x" * 80
    answer = service.post("/predict", {"texts": [long, "y" * 10]})[1]["results"]
    assert [[name for name, _ in one["scores"]] for one in answer] == [["long", "short"], ["short", "long"]]
    best = service.post("/predict", {"text": long, "top_k": 1.0})[1]["results"][0]["scores"]
    assert best == [["long", pytest.approx(0.8)]]
    status, refusal = service.post("/predict", {"text": "a", "text_pair": "b"})
    assert (status, "expects one text" in refusal["error"]) == (422, True)


def test_ready_and_metrics(service: Any, runs: Path) -> None:
    for thread in threading.enumerate():
        if thread.name == "tunesmith-load":  # the load at the start, which makes the service ready
            thread.join()
    service.service.ready = False
    assert service.ask("GET", "/ready")[0] == 503
    service.service.load()
    assert json.loads(service.ask("GET", "/ready")[2]) == {"ready": True}
    service.post("/predict", {"texts": ["a", "b"]})
    service.post("/predict", {"texts": 1})
    text = service.ask("GET", "/metrics")[2].decode()
    assert 'tunesmith_requests_total{route="/predict",status="200"} 1.0\n' in text
    assert 'tunesmith_requests_total{route="/predict",status="422"} 1.0\n' in text
    assert "tunesmith_rows_total 2.0\n" in text
    assert "tunesmith_predict_seconds_count 1.0\n" in text


def test_every_route_needs_the_key(service: Any) -> None:
    bare = {"Host": f"127.0.0.1:{service.port}"}
    for path in ("/health", "/ready", "/metrics"):
        status, _, body = service.ask("GET", path, headers=bare)
        assert (status, b"Bearer KEY" in body) == (401, True)
    assert key_file() != token_file()


def test_service_log_has_status_and_time_but_no_text(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tunesmith.requests"):
        service.post("/predict", {"texts": ["a secret", "another secret"]})
    line = json.loads(caplog.records[-1].message)
    assert (line["status"], line["rows"]) == (200, 2)
    assert "secret" not in caplog.text


def test_long_request_does_not_delay_short_ones(runs: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "BATCH_CHARS", 100)
    batcher = Batcher(LiveModel(runs, lambda folder: fake))
    fake.wait.clear()

    async def together() -> None:
        first = asyncio.create_task(batcher.classify(Texts(("a",), None)))
        await asyncio.sleep(0.3)  # its batch has started
        others = [batcher.classify(Texts(("x" * size,), None)) for size in (40, 40, 40, 300, 10, 90)]
        waiting = asyncio.gather(first, *others)
        await asyncio.sleep(0.3)
        fake.wait.set()
        shares = [result[0].probabilities["long"] for result in await waiting]
        assert shares == pytest.approx([0.01, 0.4, 0.4, 0.4, 1.0, 0.1, 0.9], abs=1e-6)

    asyncio.run(together())
    assert fake.batches == [1, 2, 1, 1, 2]


def test_replaced_model_loads_while_old_one_serves(runs: Path) -> None:
    folder = RunDir(runs / "alpha").model
    loaded: list[str] = []
    gate, reloads = threading.Event(), []

    def load(_: Path) -> str:
        if loaded:
            gate.wait(20)
        loaded.append(f"model {len(loaded)}")
        return loaded[-1]

    model = LiveModel(folder, load, on_reload=reloads.append)
    assert model.get() == "model 0"
    facts = folder / "tunesmith.json"
    facts.write_text(facts.read_text() + " ")
    assert model.get() == "model 0"
    gate.set()
    end = time.monotonic() + 10
    while not reloads and time.monotonic() < end:
        time.sleep(0.01)
    assert (reloads, model.get()) == ([None], "model 1")


def test_service_has_only_documented_routes(service: Any) -> None:
    status, _, body = service.ask("GET", "/health")
    assert status == 200
    assert json.loads(body) == {"run": "alpha", "columns": ["text"], "labels": ["short", "long"]}
    assert service.post("/predict", {"texts": ["a" * 30, "b" * 90]})[1]["results"][1]["label"] == "long"
    assert service.ask("GET", "/runs/alpha")[0] == 404
    assert service.ask("GET", "/predict")[0] == 405


def test_run_without_model_is_refused_before_listening(runs: Path) -> None:
    with pytest.raises(ConfigError, match="not finished"):
        PredictionService(runs / "beta")


async def ask_once(port: int, k: int) -> tuple[int, int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"texts": ["x" * (1 + k % 99)]}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {'t' * 43}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, rest = answer.partition(b"\r\n\r\n")
    return k, int(top.split(b" ")[1]), (json.loads(rest), b"retry-after" in top)


def test_thousand_concurrent_requests_are_answered_once(service: Any) -> None:
    service.service.batcher._max_waiting = service_module.MAX_WAITING

    async def all_at_once() -> list[tuple[int, int, Any]]:
        gate = asyncio.Semaphore(600)  # open files of this process, not of the service

        async def one(k: int) -> tuple[int, int, Any]:
            async with gate:
                return await ask_once(service.port, k)

        return await asyncio.gather(*(one(k) for k in range(1000)))

    answers = asyncio.run(all_at_once())
    assert len(answers) == 1000
    good = 0
    for k, status, (data, retry) in answers:
        assert status in (200, 429)
        if status == 200:
            good += 1
            assert dict(data["results"][0]["scores"])["long"] == pytest.approx((1 + k % 99) / 100, abs=1e-6)
        else:
            assert retry
    assert good > 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("trained") / "run", 0)


def shares(results: list[Prediction]) -> list[list[float]]:
    return [list(result.probabilities.values()) for result in results]


TEXTS = [" ".join(["the film was", word, *["very"] * k]) for k, word in enumerate(["good", "bad", "fine", "poor"] * 4)]


def test_batched_equals_unbatched(trained: RunDir) -> None:
    predictor = load_on_cpu(trained.path)
    alone = np.array([predictor.probabilities([text])[0] for text in TEXTS])
    batcher = Batcher(LiveModel(trained.path, lambda folder: predictor))

    async def together() -> list[list[Prediction]]:
        return await asyncio.gather(*(batcher.classify(Texts((text,), None)) for text in TEXTS))

    found = np.array([shares(results)[0] for results in asyncio.run(together())])
    np.testing.assert_allclose(found, alone, atol=1e-5)
    assert (found.argmax(axis=1) == alone.argmax(axis=1)).all()
