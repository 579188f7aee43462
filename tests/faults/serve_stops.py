"""SIGTERM and replaced models under load: what became of the requests that were under way.

python tests/faults/serve_stops.py RUN OTHER_RUN [--times 20] [--clients 16] [--workers 1]      # or two exported folders
Starts `tunesmith serve` on a copy of RUN, with clients that ask one request after the other; half of them keep their
connection. First the model is replaced by that of OTHER_RUN and back, so many times. Then the service is ended with SIGTERM and
started again, so many times. A request is lost when it was sent before the signal and got no answer, or at any time got an
answer that is neither of the two models'. Exit code 1 when one was lost or wrong, or when SIGTERM ended in another code than 143.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.serve_requests import KEY, post, send, wait_until_answered

TEXTS = ["the film was good", "a bad day", "it is very sour and dull", "one great book", "we", "not a fine meal"]


class Clients:
    """Clients that ask until they are stopped; `found` counts what became of the requests."""

    def __init__(self, port: int, scores: list[list[float]]) -> None:
        self.port = port
        self.scores = scores
        """The score of the first label of each text, of both models."""
        self.found: Counter[str] = Counter()
        self.stopped_at = float("inf")
        self.ended = False
        self.seen = [0, 0]
        """Answers of each model since it was last looked."""

    async def ask_on(self, number: int) -> None:
        """One client: a connection for all requests, or one for each."""
        streams = None
        turn = number
        while not self.ended:
            turn += 1
            sent = time.monotonic()
            try:
                if streams is None or number % 2:
                    streams = await asyncio.open_connection("127.0.0.1", self.port)
                status, body = await _ask(streams, post(self.port, _body(TEXTS[turn % len(TEXTS)])))
            except (OSError, asyncio.IncompleteReadError):
                self.found["lost" if sent < self.stopped_at else "refused after SIGTERM"] += 1
                if time.monotonic() > self.stopped_at:
                    return
                streams = None
                continue
            self._judge(turn % len(TEXTS), status, body)
            if number % 2:
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


class Service:
    """`tunesmith serve` as a process."""

    def __init__(self, run: Path, workers: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        words = [sys.executable, "-m", "tunesmith", "serve", str(run), "--port", str(self.port)]
        words += ["--workers", str(workers)]
        environment = {**os.environ, "TUNESMITH_SERVE_KEY": KEY}
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet)
        wait_until_answered(self.port, self.process)

    def scores(self) -> list[float]:
        """The score of "bad" of each text, asked one by one."""
        return [
            dict(json.loads(send(self.port, post(self.port, _body(text)))[1])["results"][0]["scores"])["bad"]
            for text in TEXTS
        ]

    def end(self) -> int:
        """Kills it, should it still run."""
        self.process.terminate()
        return self.process.wait(timeout=60)


def replace_model(run: Path, source: Path, number: int) -> None:
    """Puts a model in the place of the one that is served, by two renames."""
    place, model = (run / "model", source / "model") if (source / "model").is_dir() else (run, source)
    new, old = run.parent / f"new-{number}", run.parent / f"old-{number}"
    shutil.copytree(model, new)
    place.rename(old)
    new.rename(place)
    shutil.rmtree(old)


async def reload_often(service: Service, run: Path, sources: list[Path], scores: Any, args: Any) -> Counter[str]:
    """Each time until the new model has answered a hundred requests and the old one none of the last twenty."""
    clients = Clients(service.port, scores)
    tasks = [asyncio.create_task(clients.ask_on(number)) for number in range(args.clients)]
    for number in range(1, args.times + 1):
        new = number % 2
        await asyncio.to_thread(replace_model, run, sources[new], number)
        end = time.monotonic() + 60
        while True:
            clients.seen = [0, 0]
            await asyncio.sleep(0.3)
            if clients.seen[new] >= 20 and not clients.seen[1 - new]:
                break
            if time.monotonic() > end:
                clients.found["never reloaded"] += 1
                break
        clients.found["reloads"] += 1
    clients.ended = True
    await asyncio.gather(*tasks)
    return clients.found


async def stop_under_load(service: Service, scores: Any, args: Any) -> Counter[str]:
    """SIGTERM at a random moment."""
    clients = Clients(service.port, scores)
    tasks = [asyncio.create_task(clients.ask_on(number)) for number in range(args.clients)]
    await asyncio.sleep(random.uniform(0.5, 1.5))
    clients.stopped_at = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    code = await asyncio.to_thread(service.process.wait, 60)
    clients.found[f"exit {code}"] += 1
    clients.found["slowest end, ms"] = round(1000 * (time.monotonic() - clients.stopped_at))
    return clients.found


def main() -> int:
    """Prints what became of the requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sources = [args.run, args.other]
        scores = []
        for source in (args.other, args.run):
            shutil.copytree(source, run, dirs_exist_ok=True)
            service = Service(run, args.workers)
            scores.insert(0, service.scores())
            service.end() if source == args.other else None
        reloads = asyncio.run(reload_often(service, run, sources, scores, args))
        stops, slowest = Counter[str](), 0
        for number in range(args.times):
            if number:
                service = Service(run, args.workers)
            found = asyncio.run(stop_under_load(service, scores, args))
            slowest = max(slowest, found.pop("slowest end, ms"))
            stops += found
    print(f"{args.times} models replaced: {dict(sorted(reloads.items()))}")
    print(f"{args.times} SIGTERMs: {dict(sorted(stops.items()))}; slowest end {slowest} ms")
    bad = [n for n in (*reloads, *stops) if n in ("lost", "wrong", "never reloaded") or n.startswith("status 5")]
    return int(bool(bad) or stops["exit 143"] != args.times or not reloads["answered"])


if __name__ == "__main__":
    raise SystemExit(main())
