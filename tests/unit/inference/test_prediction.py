"""One model as a service: right row to right caller under load, batched equal to unbatched, a replaced model noticed."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tunesmith.errors import ConfigError
from tunesmith.inference.batcher import Batcher, LoadedModels, Prediction, Texts, load_run_predictor
from tunesmith.inference.server import BadRequest
from tunesmith.inference.service import PredictionService
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import write_sealed

sys.path.append(str(Path(__file__).parents[2] / "browser"))


@pytest.fixture
def service(runs: Path, serving: SimpleNamespace) -> Iterator[Any]:
    model = serving.FakeModel()
    made = PredictionService(RunDir(runs / "alpha"), Batcher(LoadedModels(lambda run: model), max_waiting=128))
    yield from serving.serve(runs, made)


def test_health_and_predict_answer_and_nothing_else_exists(service: Any) -> None:
    status, _, body = service.ask("GET", "/health")
    assert status == 200
    assert json.loads(body) == {"run": "alpha", "columns": ["text"], "labels": ["short", "long"]}
    assert service.post("/predict", {"texts": ["a" * 30, "b" * 90]})[1]["results"][1]["label"] == "long"
    assert service.ask("GET", "/runs/alpha")[0] == 404
    assert service.ask("GET", "/predict")[0] == 405


def test_health_knows_that_the_model_is_gone_or_changed(service: Any, runs: Path) -> None:
    model = RunDir(runs / "alpha").model
    facts = (model / "tunesmith.json").read_text()
    (model / "tunesmith.json").write_text("[" * 5000)
    status, _, body = service.ask("GET", "/health")
    assert (status, json.loads(body)["error"]) == (503, "model/tunesmith.json cannot be read")
    shutil.rmtree(model)
    assert json.loads(service.ask("GET", "/health")[2])["error"] == "model/ is missing"
    write_sealed(model, lambda folder: (folder / "tunesmith.json").write_text(facts), {})
    assert service.ask("GET", "/health")[0] == 200
    (model / "tunesmith.json").write_text(facts.replace("short", "slight"))
    status, _, body = service.ask("GET", "/health")
    assert status == 503
    assert "tunesmith.json" in json.loads(body)["error"]


def test_a_run_without_a_model_is_refused_before_anything_listens(runs: Path) -> None:
    with pytest.raises(ConfigError, match="contains no finished model"):
        PredictionService(RunDir(runs / "beta"))


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


def test_a_thousand_requests_at_once_are_each_answered_once(service: Any) -> None:
    async def all_at_once() -> list[tuple[int, int, Any]]:
        gate = asyncio.Semaphore(600)  # sockets of this process, not of the service

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


def make_run(folder: Path, seed: int) -> RunDir:
    """A run folder whose model was never trained: enough to predict with."""
    from tiny_training import make_model
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    new = folder / f"new-{seed}"
    make_model(new)
    set_seed(seed)
    config = BertConfig.from_pretrained(new, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    BertForSequenceClassification(config).save_pretrained(new)
    facts = {
        "labels": {"names": ["bad", "good"], "task": "binary"},
        "text_columns": ["text"],
        "label_column": "label",
        "max_length": 16,
        "glue_task": None,
        "metrics": None,
    }
    (new / "tunesmith.json").write_text(json.dumps(facts))
    if run.model.exists():
        run.model.rename(folder / "old")
    new.rename(run.model)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("trained") / "run", 0)


def shares(results: list[Prediction]) -> list[list[float]]:
    return [list(result.probabilities.values()) for result in results]


TEXTS = [" ".join(["the film was", word, *["very"] * k]) for k, word in enumerate(["good", "bad", "fine", "poor"] * 4)]


def test_batched_equals_unbatched(trained: RunDir) -> None:
    predictor = load_run_predictor(trained)
    alone = np.array([predictor.probabilities([text])[0] for text in TEXTS])
    batcher = Batcher(LoadedModels(lambda run: predictor))

    async def together() -> list[list[Prediction]]:
        return await asyncio.gather(*(batcher.classify(trained, Texts((text,), None)) for text in TEXTS))

    found = np.array([shares(results)[0] for results in asyncio.run(together())])
    batcher.close()
    np.testing.assert_allclose(found, alone, atol=1e-5)
    assert (found.argmax(axis=1) == alone.argmax(axis=1)).all()


def test_a_model_that_was_replaced_is_loaded_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0)
    batcher = Batcher()

    def ask() -> list[list[float]]:
        return shares(asyncio.run(batcher.classify(run, Texts(tuple(TEXTS[:2]), None))))

    before = ask()
    assert ask() == before
    make_run(tmp_path / "run", 1)
    after = ask()
    batcher.close()
    assert after != before


def test_a_pair_for_a_model_of_single_texts_is_refused(trained: RunDir) -> None:
    batcher = Batcher()
    with pytest.raises(BadRequest, match="expects 1 text"):
        asyncio.run(batcher.classify(trained, Texts(("a",), ("b",))))
    batcher.close()


def test_one_batcher_serves_many_threads_of_callers(service: Any) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda k: service.post("/predict", {"texts": ["y" * k]}), range(1, 61)))
    assert [round(100 * dict(answer["results"][0]["scores"])["long"]) for status, answer in found if status == 200] == [
        k for k, (status, _) in zip(range(1, 61), found, strict=True) if status == 200
    ]
