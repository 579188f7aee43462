"""The prediction service under load, beside a plain FastAPI server around transformers' pipeline, in the same run.

python bench/serve_load.py RUN TEXTS.csv [--clients 64] [--seconds 20]
Each client keeps one request of one text in flight over a kept connection. Every answer is compared with bulk prediction. Prints
requests a second, p50 and p99, wrong and lost answers; bulk rows a second of the same texts are the ceiling.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEY = "k" * 43
PEER = """
import sys
from fastapi import FastAPI
from transformers import pipeline
import uvicorn
model = pipeline("text-classification", sys.argv[1], device="cpu")
app = FastAPI()
@app.post("/predict")
def predict(body: dict):
    return {"results": [{"label": one["label"]} for one in model(body["texts"])]}
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("texts", help="csv; its first column is read")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with open(args.texts, newline="", encoding="utf-8") as lines:
        texts = [row[0] for row in csv.reader(lines)][1:1001]
    labels, bulk = predict_all(args.run, texts)
    ours = [sys.executable, "-m", "tunesmith", "serve", args.run, "--port", "{port}"]
    folder = args.run if (Path(args.run) / "export.json").is_file() else str(Path(args.run) / "model")
    peer = [sys.executable, "-c", PEER, folder, "{port}"]
    print(
        f"bulk prediction: {bulk:,.0f} rows/s; {os.cpu_count()} cores, {args.clients} clients, {args.seconds:g} s each"
    )
    print("| server | requests/s | of bulk | p50 ms | p99 ms | answers | wrong | 429 | lost |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, command in (("tunesmith serve", ours), ("FastAPI + pipeline", peer)):
        if name != "tunesmith serve" and folder == args.run:
            continue
        times, wrong, later, lost = load(command, texts, labels, args)
        rate = len(times) / args.seconds
        p50, p99 = (1000 * times[int(q * (len(times) - 1))] for q in (0.5, 0.99)) if times else (0.0, 0.0)
        print(
            f"| {name} | {rate:,.0f} | {rate / bulk:.2f} | {p50:.0f} | {p99:.0f} | {len(times)} | {wrong} | {later} | {lost} |",
            flush=True,
        )
    return 0


def predict_all(run: str, texts: list[str]) -> tuple[list[str], float]:
    """Labels and rows a second of one call."""
    from tunesmith import Predictor

    model = Predictor.load(run, use_cpu=True)
    model.predict(texts[:32])
    start = time.perf_counter()
    labels = model.predict(texts)
    return labels, len(texts) / (time.perf_counter() - start)


def load(
    command: list[str], texts: list[str], labels: list[str], args: argparse.Namespace
) -> tuple[list[float], int, int, int]:
    """Sorted seconds of the good answers, and how many were wrong, 429 or lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = [word.replace("{port}", str(port)) for word in command]
    environment = {**os.environ, "TUNESMITH_SERVE_KEY": KEY}
    server = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        return asyncio.run(_drive(port, texts, labels, args))
    finally:
        server.terminate()
        server.wait(timeout=30)


async def _drive(
    port: int, texts: list[str], labels: list[str], args: argparse.Namespace
) -> tuple[list[float], int, int, int]:
    for _ in range(600):  # a model of a minute's loading is not what is measured here
        try:
            if (await _ask(await asyncio.open_connection("127.0.0.1", port), port, texts[0]))[0] == 200:
                break
        except OSError:
            pass
        await asyncio.sleep(0.1)
    times: list[float] = []
    counts = {"wrong": 0, "later": 0, "lost": 0}
    end = time.perf_counter() + args.seconds

    async def client(number: int) -> None:
        streams = await asyncio.open_connection("127.0.0.1", port)
        at = number
        while time.perf_counter() < end:
            at = (at + args.clients) % len(texts)
            start = time.perf_counter()
            try:
                status, answer = await _ask(streams, port, texts[at])
            except (OSError, asyncio.IncompleteReadError, ValueError):
                counts["lost"] += 1
                streams = await asyncio.open_connection("127.0.0.1", port)
                continue
            if status == 429:
                counts["later"] += 1
                await asyncio.sleep(0.05)
            elif status != 200:
                counts["lost"] += 1
            else:
                times.append(time.perf_counter() - start)
                counts["wrong"] += answer["results"][0]["label"] != labels[at]

    await asyncio.gather(*(client(number) for number in range(args.clients)))
    return sorted(times), counts["wrong"], counts["later"], counts["lost"]


async def _ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], port: int, text: str) -> tuple[int, Any]:
    reader, writer = streams
    body = json.dumps({"texts": [text]}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    size = int(top.split("content-length:")[1].split("\r\n")[0])
    return int(top.split(" ")[1]), json.loads(await reader.readexactly(size))


if __name__ == "__main__":
    raise SystemExit(main())
