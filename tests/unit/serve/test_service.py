"""The prediction service as an operator and a client see it: dialects, limits, counters, keys, reload, the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.labels import LabelMap, Task
from tunesmith.run.layout import RunDir
from tunesmith.serve.bodies import BadRequest
from tunesmith.serve.prediction import PredictionService
from tunesmith.serve.questions import answer_in_form, parse_question
from tunesmith.serve.token import key_file, token_file
from tunesmith.serve.tryit import Classifier

LABELS = LabelMap.for_classes(["short", "long"])


@pytest.fixture
def fake(serving: SimpleNamespace) -> Any:
    return serving.FakeModel()


@pytest.fixture
def service(runs: Path, serving: SimpleNamespace, fake: Any) -> Iterator[Any]:
    made = PredictionService(RunDir(runs / "alpha"), Classifier(lambda run: fake, max_waiting=4))
    yield from serving.serve(runs, made)


@pytest.mark.parametrize(
    ("body", "texts", "pairs"),
    [
        ({"text": "a"}, ("a",), None),
        ({"text": "a", "text_pair": "b"}, ("a",), ("b",)),
        ({"texts": ["a", "b"], "top_k": 1, "raw_scores": True}, ("a", "b"), None),
        ({"inputs": "a"}, ("a",), None),
        ({"inputs": ["a", "b"]}, ("a",), ("b",)),
        ({"inputs": [["a"], ["b"]], "truncate": True}, ("a", "b"), None),
        ({"inputs": [["a", "b"], ["c", "d"]]}, ("a", "c"), ("b", "d")),
    ],
)
def test_both_dialects_are_read(body: Any, texts: Any, pairs: Any) -> None:
    question = parse_question(body)
    assert (question.given.texts, question.given.pairs) == (texts, pairs)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"texts": "a"},
        {"texts": ["a"], "top_k": 0},
        {"texts": ["a"], "top_k": True},
        {"texts": ["a"], "raw_scores": 1},
        {"texts": ["a"], "other": 1},
        {"text": 3},
        {"inputs": []},
        {"inputs": ["a", "b", "c"]},
        {"inputs": [["a"], ["b", "c"]]},
        {"inputs": [[]]},
        {"inputs": {"a": 1}},
        {"inputs": "a", "top_k": 1},
    ],
)
def test_what_is_no_question_is_refused(body: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_question(body)
    assert refused.value.status == 422


def test_scores_are_sorted_cut_and_raw_as_asked(service: Any) -> None:
    long = "x" * 80
    answer = service.post("/predict", {"texts": [long, "y" * 10]})[1]["results"]
    assert [[name for name, _ in one["scores"]] for one in answer] == [["long", "short"], ["short", "long"]]
    assert service.post("/predict", {"text": long, "top_k": 1})[1]["results"][0]["scores"] == [
        ["long", pytest.approx(0.8)]
    ]
    raw = service.post("/predict", {"text": long, "raw_scores": True})[1]["results"][0]["scores"]
    assert raw[0] == ["long", pytest.approx(-0.2231, abs=1e-3)]
    assert service.post("/predict", {"inputs": long})[1][0] == {"score": pytest.approx(0.8), "label": "long"}
    rows = service.post("/predict", {"inputs": [[long], ["y"]]})[1]
    assert [row[0]["label"] for row in rows] == ["long", "short"]
    status, refusal = service.post("/predict", {"inputs": ["a", "b"]})
    assert (status, "reads 1 text" in refusal["error"]) == (422, True)


def test_a_number_and_several_labels_have_a_form_of_their_own() -> None:
    number = LabelMap(("stars",), Task.REGRESSION)
    one = {"label": 3.5, "scores": [], "logits": [3.5]}
    assert answer_in_form(parse_question({"text": "a"}), [one], number) == {"results": [{"label": 3.5, "scores": []}]}
    assert answer_in_form(parse_question({"inputs": "a"}), [one], number) == [{"score": 3.5, "label": "stars"}]
    many = LabelMap(("a", "b", "c"), Task.MULTILABEL)
    one = {"label": ["a", "c"], "scores": [["a", 0.9], ["b", 0.1], ["c", 0.8]], "logits": [2.2, -2.2, 1.4]}
    found = answer_in_form(parse_question({"text": "a", "top_k": 2}), [one], many)
    assert found == {"results": [{"label": ["a", "c"], "scores": [["a", 0.9], ["c", 0.8]]}]}


def test_a_full_queue_is_429_with_retry_after_and_nothing_accepted_is_lost(service: Any, fake: Any) -> None:
    fake.wait.clear()
    found: list[tuple[int, Any]] = []
    threads = [
        threading.Thread(target=lambda k=k: found.append(service.post("/predict", {"text": "z" * k})))
        for k in range(1, 15)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 10
    while sum(status == 429 for status, _ in found) < 7 and time.monotonic() < end:
        time.sleep(0.02)
    sent = service.good() | {"Content-Type": "application/json"}
    status, headers, _ = service.ask("POST", "/predict", headers=sent, body=b'{"text": "a"}')
    assert (status, headers["retry-after"]) == (429, "2")
    fake.wait.set()
    for thread in threads:
        thread.join()
    assert {status for status, _ in found} == {200, 429}
    assert sum(status == 200 for status, _ in found) >= 4


def test_ready_metrics_info_and_the_description(service: Any, runs: Path) -> None:
    assert service.ask("GET", "/ready")[0] == 503
    service.board.load()
    assert json.loads(service.ask("GET", "/ready")[2]) == {"ready": True}
    service.post("/predict", {"texts": ["a", "b"]})
    service.post("/predict", {"texts": 1})
    text = service.ask("GET", "/metrics")[2].decode()
    assert 'tunesmith_requests_total{route="/predict",status="200"} 1\n' in text
    assert 'tunesmith_requests_total{route="/predict",status="422"} 1\n' in text
    assert "tunesmith_rows_total 2\n" in text
    assert "tunesmith_predict_seconds_count 1\n" in text
    info = json.loads(service.ask("GET", "/info")[2])
    assert info["model_type"]["classifier"]["id2label"] == {"0": "short", "1": "long"}
    document = json.loads(service.ask("GET", "/openapi.json")[2])
    assert {"/predict", "/health", "/ready", "/metrics"} <= document["paths"].keys()
    assert b"POST /predict" in service.ask("GET", "/docs")[2]


def test_every_route_needs_the_key_and_it_is_not_the_boards(service: Any) -> None:
    bare = {"Host": f"127.0.0.1:{service.port}"}
    for path in ("/health", "/ready", "/metrics", "/info", "/openapi.json", "/docs"):
        assert service.ask("GET", path, headers=bare)[0] == 401
    assert key_file() != token_file()


def test_the_log_has_status_and_time_but_no_text(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tunesmith.requests"):
        service.post("/predict", {"texts": ["a secret", "another secret"]})
    line = json.loads(caplog.records[-1].message)
    assert (line["status"], line["rows"]) == (200, 2)
    assert "secret" not in caplog.text


def test_a_replaced_model_is_loaded_aside_while_the_old_one_answers(
    runs: Path, serving: SimpleNamespace, tmp_path: Path
) -> None:
    import asyncio
    import shutil

    from tunesmith.serve.bodies import Texts

    run = RunDir(shutil.copytree(runs / "alpha", tmp_path / "alpha"))
    models: list[Any] = []
    gate, reloads = threading.Event(), []

    def load(_: RunDir) -> Any:
        if models:
            gate.wait(20)
        models.append(serving.FakeModel())
        return models[-1]

    classifier = Classifier(load, reload_aside=True, on_reload=reloads.append)

    def ask() -> None:
        assert asyncio.run(classifier.classify(run, Texts(("abc",), None)))[0]["label"] == "short"

    ask()
    facts = run.model / "tunesmith.json"
    facts.write_text(facts.read_text() + " ")
    ask()
    assert (len(models), models[0].batches) == (1, [1, 1]), "the old model answers while the new one loads"
    gate.set()
    end = time.monotonic() + 10
    while not reloads and time.monotonic() < end:
        time.sleep(0.01)
    ask()
    assert (reloads, models[1].batches) == ([None], [1])
    classifier.close()
