"""The prediction service as a real process: hostile requests, a replaced model and SIGTERM under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from faults.trials import free_port, size
from patience import patient
from served_model import GOOD, KEY, make_sealed_run, post, send
from tunesmith.inference.service import load_on_cpu

TEXTS = ["the film was good", "a bad day", "it is very sour and dull", "one great book", "we", "not a fine meal"]


def _values(chance: random.Random) -> object:
    """Return a strategy for JSON values, most of them invalid."""
    text = "".join(
        chance.choice("a \u0000\u202e\ud83d\ude00é%s{}<script>'\"\\\n漢") for _ in range(chance.randint(0, 60))
    )
    plain: list[object] = [None, True, -1, 0, 1e308, 10**40, "", text, [], {}, [[]], [None], [text], [[text, text]]]
    plain.append(text * 9)
    choice = chance.choice(plain)
    return [choice] * chance.choice([1, 2, 3, 65]) if chance.random() < 0.3 else choice


def _bad_body(chance: random.Random) -> bytes:
    names = ["texts", "pairs", "text", "text_pair", "inputs", "top_k", "truncate", "__class__", "é"]
    kind = chance.randrange(8)
    if kind < 4:
        fields = {chance.choice(names): _values(chance) for _ in range(chance.randint(1, 4))}
        return json.dumps(fields).encode("utf-8", "surrogatepass")
    whole = json.dumps({"texts": ["word " * chance.randint(1, 40)], "top_k": 2}).encode()
    if kind == 4:
        return whole[: chance.randrange(len(whole))]
    if kind == 5:
        mutable = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            mutable[chance.randrange(len(mutable))] = chance.randrange(256)
        return bytes(mutable)
    if kind == 6:
        return chance.choice([b"[" * 50_000, b'{"a":' * 20_000, b'{"texts": [' + b'"a",' * 9000, b"NaN", b'"\\ud800"'])
    return chance.randbytes(chance.choice([1, 100, 5000, 1_100_000]))


def hostile_requests(port: int, seed: int, count: int) -> Iterator[bytes]:
    """Yield seeded requests; some contain valid JSON and may succeed."""
    chance = random.Random(seed)
    for _ in range(count):
        body = _bad_body(chance)
        kind = chance.randrange(20)
        if kind < 11:
            yield post(port, body)
        elif kind == 11:
            yield post(port, body, key=chance.choice(["", "x" * 43, "\udcff" * 9, KEY[:-1]]))
        elif kind == 12:
            yield post(
                port, body, size=chance.choice(["-1", "99999999999999999999", "abc", "0x10", "5, 6", "10000000"])
            )
        elif kind == 13:
            yield post(
                port, body, path=chance.choice(["/", "/../../etc/passwd", "/predict/", "/%00", "//evil", "/a" * 900])
            )
        elif kind == 14:
            yield post(port, body, more=f"X-Long: {'y' * chance.choice([10, 20_000])}\r\n")
        elif kind == 15:
            yield post(port, GOOD, more=f"Content-Type: {chance.choice(['text/plain', 'multipart/form-data', ''])}\r\n")
        elif kind == 16:
            yield post(port, GOOD, more="Transfer-Encoding: chunked\r\n")
        elif kind == 17:
            yield post(port, body, more=chance.choice(["Host: evil.example\r\n", "Origin: http://evil.example\r\n"]))
        elif kind == 18:
            yield post(port, GOOD).replace(
                b"POST", chance.choice([b"PUT", b"TRACE", b"G\xc3\xa9T", b"CONNECT", b"GET"]), 1
            )
        else:
            yield chance.randbytes(chance.randint(1, 300)) + b"\r\n\r\n"


def throw(port: int, count: int) -> Counter[int]:
    """Send hostile requests and count the responses by status; a good request after every hundred must succeed."""
    found: Counter[int] = Counter()
    requests = hostile_requests(port, 0, count)
    with ThreadPoolExecutor(16) as threads:  # some never get a response, which takes seconds each
        while some := list(islice(requests, 100)):
            found.update(status for status, _ in threads.map(lambda one: send(port, one, seconds=2.5), some))
            status, body = send(port, post(port, GOOD), seconds=60)
            assert status == 200, f"a good request after {found.total()} bad ones: {status} {body[:200]!r}"
    return found


class Clients:
    """Clients that send requests until they are stopped; `found` counts the outcomes."""

    def __init__(self, port: int, scores: list[list[float]]) -> None:
        self.port = port
        self.scores = scores
        """Score of the first label of each text, for both models."""
        self.found: Counter[str] = Counter()
        self.stopped_at = float("inf")
        self.ended = False
        self.seen = [0, 0]
        """Responses of each model since the last check."""

    async def ask_on(self, number: int) -> None:
        """Run a client with one connection for all requests, or one per request."""
        streams = None
        turn = number
        while not self.ended:
            turn += 1
            sent = time.monotonic()
            try:
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", self.port)
                status, body = await _ask(streams, post(self.port, _body(TEXTS[turn % len(TEXTS)])))
                self._judge(turn % len(TEXTS), status, body)
            except (OSError, asyncio.IncompleteReadError):
                self.found["lost" if sent < self.stopped_at else "refused after SIGTERM"] += 1
                if time.monotonic() > self.stopped_at:
                    break
                status = 0
            if streams is not None and (number % 2 or status == 0):
                streams[1].close()
                streams = None
        if streams is not None:
            streams[1].close()

    def _judge(self, at: int, status: int, body: bytes) -> None:
        if status != 200:
            self.found[f"status {status}"] += 1
            return
        score = dict(json.loads(body)["results"][0]["scores"])["bad"]
        near = [abs(score - known[at]) < 1e-4 for known in self.scores]
        self.found["answered" if any(near) else "wrong"] += 1
        for model in (0, 1):
            self.seen[model] += near[model]


def _body(text: str) -> bytes:
    return json.dumps({"texts": [text]}).encode()


async def _ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> tuple[int, bytes]:
    reader, writer = streams
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(size)


def replace_model(run: Path, source: Path) -> None:
    """Replace the served model by two renames."""
    shutil.copytree(source / "model", run / "new")
    (run / "model").rename(run / "old")
    (run / "new").rename(run / "model")
    shutil.rmtree(run / "old")


async def replace_then_stop(server: subprocess.Popen[bytes], clients: Clients, run: Path, source: Path) -> None:
    """With 16 clients: replace the model, wait until only the new one responds, then send SIGTERM."""
    tasks = [asyncio.create_task(clients.ask_on(number)) for number in range(16)]
    await asyncio.to_thread(replace_model, run, source)
    end = time.monotonic() + patient(60)
    while clients.seen[1] < 20 or clients.seen[0]:
        assert time.monotonic() < end, "the new model was never loaded"
        if clients.seen[0]:
            clients.seen = [0, 0]
        await asyncio.sleep(0.3)
    await asyncio.sleep(random.uniform(0.0, 0.5))
    clients.stopped_at = time.monotonic()
    server.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)


def test_service_survives_attacks_reload_and_sigterm(tmp_path: Path) -> None:
    runs = [make_sealed_run(tmp_path / f"run-{seed}", seed) for seed in (0, 1)]
    scores = [load_on_cpu(run.path).probabilities(TEXTS)[:, 0].tolist() for run in runs]
    port = free_port()
    words = [sys.executable, "-m", "tunesmith", "serve", str(runs[0].path), "--port", str(port)]
    env = {**os.environ, "TUNESMITH_SERVE_KEY": KEY, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_answered(port, server)
        statuses = throw(port, size(full=10_000, ci=200))
        assert server.poll() is None
        assert [status for status in statuses if status >= 500 and status != 503] == []
        assert {400, 401, 422} <= statuses.keys()
        clients = Clients(port, scores)
        asyncio.run(replace_then_stop(server, clients, runs[0].path, runs[1].path))
        assert server.wait(timeout=patient(20)) == 143
    finally:
        server.kill()
        server.wait()
    assert clients.found["answered"] > 20
    assert {"lost", "wrong"} & clients.found.keys() == set(), clients.found
    assert not [name for name in clients.found if name.startswith("status 5")], clients.found


def wait_until_answered(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + patient(120)
    while time.monotonic() < end and server.poll() is None:
        try:
            if send(port, post(port, GOOD))[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the service did not answer (exit code {server.poll()})")
