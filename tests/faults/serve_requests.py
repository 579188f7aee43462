"""Malformed and hostile requests for the prediction service, and what became of them.

python tests/faults/serve_requests.py RUN [--count 10000] [--seed 0]
Starts `tunesmith serve RUN` and sends it so many bad requests over loopback, with a good one after every hundred. Prints the
answers by status and the memory of the service. Exit code 1 when it crashed, answered 5xx other than 503, gave a wrong answer
to a good request, or grew by more than 5% over the second half.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

KEY = "k" * 43
GOOD = b'{"texts": ["a plain text"]}'
AT_ONCE = 16
UNSENT = 0
"""In the place of a status: the connection was closed without an answer."""


def post(
    port: int, body: bytes, *, path: str = "/predict", key: str = KEY, more: str = "", size: str | None = None
) -> bytes:
    """A POST as bytes; `size` stands for the true length."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n{more}"
    if "Content-Type" not in more:
        head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {size or len(body)}\r\n\r\n".encode("utf-8", "surrogateescape") + body


def _values(chance: random.Random) -> object:
    """Some JSON value, seldom the right one."""
    text = "".join(
        chance.choice("a \u0000\u202e\ud83d\ude00é%s{}<script>'\"\\\n漢") for _ in range(chance.randint(0, 60))
    )
    plain: list[object] = [
        None,
        True,
        -1,
        0,
        1e308,
        10**40,
        "",
        text,
        [],
        {},
        [[]],
        [None],
        [text],
        [[text, text]],
        text * 9,
    ]
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
    """So many requests, the same for the same seed; some of them are well-formed JSON that may even be answered."""
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


def send(port: int, request: bytes, seconds: float = 5.0) -> tuple[int, bytes]:
    """Status and body of the first answer; UNSENT when there was none in this time, or the server closed without one."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as raw:
        with suppress(ConnectionError):  # refused before it was read to its end: the answer may be there
            raw.sendall(request)
        try:
            while not _is_whole(answer) and (part := raw.recv(65536)):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.1 ") else UNSENT), body


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    size = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0].strip()
    return bool(end) and size.isdigit() and len(body) >= int(size)


def throw(port: int, seed: int, count: int) -> Counter[int]:
    """The answers by status, all requests sent; a good one after every hundred must be answered."""
    found: Counter[int] = Counter()
    requests = hostile_requests(port, seed, count)
    with ThreadPoolExecutor(
        AT_ONCE
    ) as threads:  # some are never answered: one after the other, each would cost seconds
        while some := list(islice(requests, 100)):
            found.update(status for status, _ in threads.map(lambda one: send(port, one), some))
            status, body = send(port, post(port, GOOD), seconds=60)
            assert status == 200, f"a good request after {found.total()} bad ones: {status} {body[:200]!r}"
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def main() -> int:
    """Prints what became of the requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = [sys.executable, "-m", "tunesmith", "serve", args.run, "--port", str(port)]
    server = subprocess.Popen(words, env={**os.environ, "TUNESMITH_SERVE_KEY": KEY}, stdout=subprocess.DEVNULL)
    try:
        wait_until_answered(port, server)
        sizes, found = [resident_bytes(server.pid)], Counter[int]()
        for part in range(10):
            found += throw(port, args.seed * 10 + part, args.count // 10)
            sizes.append(resident_bytes(server.pid))
        alive = server.poll() is None
    finally:
        server.terminate()
        code = server.wait(timeout=60)
    bad = sum(count for status, count in found.items() if status >= 500 and status != 503)
    growth = max(sizes[6:]) / max(sizes[:6]) - 1
    print(f"{found.total():,} requests, seed {args.seed}: {dict(sorted(found.items()))} (0: no answer)")
    print(
        f"memory {[size >> 20 for size in sizes]} MiB, {growth:+.1%} over the second half; alive {alive}, then exit {code}"
    )
    return int(bad > 0 or not alive or growth > 0.05)


def wait_until_answered(port: int, server: subprocess.Popen[bytes], seconds: float = 600.0) -> None:
    """Returns when a good request is answered."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            if send(port, post(port, GOOD))[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the service did not answer (exit code {server.poll()})")


if __name__ == "__main__":
    raise SystemExit(main())
