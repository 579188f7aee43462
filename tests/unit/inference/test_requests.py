"""FAULTS rows 35 to 37: requests that are too large, too slow, too many or harmful are refused with a reason."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from patience import patient
from tunesmith.inference import board, server

PREDICT = "/predict"
POLICY = '<meta http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;">'


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b'{"texts": []}', 422, "at least one string"),
        (b'{"texts": "abc"}', 422, "list of at least one string"),
        (b'{"texts": ["a"], "pairs": ["b", "c"]}', 422, "1 texts but 2 pairs"),
        (b'{"texts": ["a"], "pairs": ["b"]}', 422, "expects one text"),
        (b'{"texts": ["a"], "model": "x"}', 422, "send"),
        (b'{"texts": ["a"], "top_k": 0}', 422, "top_k"),
        (b'{"texts": ["a"], "top_k": true}', 422, "top_k"),
        (b'{"texts": ["a"], "top_k": 1.5}', 422, "top_k"),
        (b'{"texts": ["a"], "top_k": 1e999}', 422, "top_k"),
        (b'{"texts": ["a"], "pairs": [""]}', 422, "pairs[0] is empty"),
        (b'{"text": 3}', 422, "list of at least one string"),
        (b'{"text": ""}', 422, "texts[0] is empty"),
        (b'{"inputs": "a"}', 422, "send"),
        (b"[]", 422, "send"),
        (b'{"texts": [NaN]}', 422, "NaN"),
        (b'{"texts": ["\\ud800"]}', 422, "surrogate"),
        (b'{"texts": ["a", " "]}', 422, "texts[1] is empty"),
        (b'{"texts": ["\xff"]}', 422, "not JSON"),
        (b"{", 422, "not JSON"),
        (b"[" * 100_000, 422, "nested too deeply"),
        (b'{"texts": ' + b'{"a":' * 50_000 + b"1", 422, "nested too deeply"),
        (json.dumps({"texts": ["a"] * 65}).encode(), 422, "at most 64"),
        (json.dumps({"texts": ["a" * 50_001]}).encode(), 413, "at most 50,000"),
        (json.dumps({"texts": ["a" * 1_000_001]}).encode(), 413, "1,000,000 bytes"),
        (json.dumps({"texts": ["panic"]}).encode(), 422, "cannot process"),
    ],
)
def test_invalid_body_is_refused_and_next_request_succeeds(service, body: bytes, status: int, word: str) -> None:
    headers = service.good() | {"Content-Type": "application/json"}
    got, _, answer = service.ask("POST", PREDICT, headers=headers, body=body)
    assert got == status, answer
    assert word in json.loads(answer)["error"]
    assert service.post(PREDICT, {"texts": ["fine"]})[0] == 200


@pytest.mark.parametrize("more", [{"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}])
def test_unsupported_content_type_is_refused(service, more: dict[str, str]) -> None:
    assert service.post(PREDICT, {"texts": ["a"]}, **more)[0] == 415


def raw_post(service, head: list[str], parts: list[bytes], pause: float = 0.0) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as raw:
        good = [f"{k}: {v}" for k, v in service.good().items()]
        lines = [f"POST {PREDICT} HTTP/1.1", *good, "Content-Type: application/json", *head, "", ""]
        raw.sendall("\r\n".join(lines).encode())
        answer = b""
        try:
            for part in parts:
                raw.sendall(part)
                time.sleep(pause)
            while part := raw.recv(65536):
                answer += part
                if b'"}' in answer:
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass
        return answer


def test_declared_300_mb_body_is_refused_before_reading(service) -> None:
    assert raw_post(service, ["Content-Length: 300000000"], []).startswith(b"HTTP/1.1 413")
    assert raw_post(service, ["Content-Length: " + "9" * 30], [])[:12] in (b"HTTP/1.1 413", b"HTTP/1.1 400")


def test_chunked_body_is_limited_while_it_arrives(service) -> None:
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    answer = raw_post(service, ["Transfer-Encoding: chunked"], [chunk] * 40)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")  # reset while the client was still sending
    assert service.post(PREDICT, {"texts": ["fine"]})[0] == 200


def test_slow_body_has_a_total_deadline(service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 0.5)
    began = time.monotonic()
    answer = raw_post(service, ["Content-Length: 1000"], [b" "] * 8, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < patient(5)


@pytest.mark.parametrize("patience", [0.5, 30.0])
def test_unread_response_does_not_keep_a_connection(served, monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
    monkeypatch.setattr(server, "UNREAD_SECONDS", patience)
    size = 12_000_000
    monkeypatch.setattr(board, "draw_report", lambda run, run_id: POLICY + "x" * size)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect(("127.0.0.1", served.port))
        one = "\r\n".join(["GET /runs/alpha/report HTTP/1.1", *(f"{k}: {v}" for k, v in served.good().items()), "", ""])
        raw.sendall(one.encode())
        time.sleep(1.5)
        raw.settimeout(30)  # a server that hangs must fail the test, not block it
        got = 0
        try:
            while got < size and (part := raw.recv(1 << 20)):
                got += len(part)
        except ConnectionResetError:
            got = -1
    assert (got >= size) == (patience > 5), "dropped after half a second, or complete before thirty"


def test_full_queue_returns_429_and_others_succeed(service) -> None:
    service.model.wait.clear()
    answers: dict[int, tuple[int, object]] = {}

    def ask(k: int) -> None:
        answers[k] = service.post(PREDICT, {"texts": ["x" * k]})

    with ThreadPoolExecutor(40) as pool:
        jobs = [pool.submit(ask, k) for k in range(1, 41)]
        wait_until(lambda: len(answers) > 20)  # refused: the model processes one batch and the queue has eight
        service.model.wait.set()
        for job in jobs:
            job.result(timeout=20)
    assert {status for status, _ in answers.values()} == {200, 429}
    for k, (status, answer) in answers.items():
        assert isinstance(answer, dict)
        if status == 200:
            assert dict(answer["results"][0]["scores"])["long"] == pytest.approx(k / 100)
        else:
            assert "waiting" in answer["error"]
    assert max(service.model.batches) > 1, "waiting requests were not taken together"
    assert service.post(PREDICT, {"texts": ["a"]})[0] == 200


def test_failing_text_does_not_affect_its_batch(service) -> None:
    service.model.wait.clear()
    answers: dict[str, int] = {}

    def ask(text: str) -> None:
        answers[text] = service.post(PREDICT, {"texts": [text]})[0]

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("first", "a", "panic", "b")]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    service.model.wait.set()
    for thread in threads:
        thread.join(20)
    assert answers == {"first": 200, "a": 200, "panic": 422, "b": 200}


def test_report_rendering_is_bounded_and_list_stays_fast(served, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def slow(run: object, run_id: str) -> str:
        assert done.wait(30)
        return POLICY

    monkeypatch.setattr(board, "draw_report", slow)
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(served.ask("GET", "/runs/alpha/report")[0])) for _ in range(26)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: statuses == [503] * 6)
    began = time.monotonic()
    assert served.ask("GET", "/")[0] == 200
    assert time.monotonic() - began < patient(3), "the list waited for the reports"
    done.set()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == [200] * 20 + [503] * 6


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(10)
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
