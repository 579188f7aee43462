"""Compare the prediction service under load with a plain FastAPI server around transformers' pipeline.

    python bench/serve_load.py RUN TEXTS.csv [--clients 64] [--seconds 20] [--rounds 3] [--workers 1 2]

Bulk prediction, `tunesmith serve` and the peer take turns, `--rounds` times. Prints medians and the machine's load. Each client
keeps one request with one text in flight, on a persistent connection. Every response is compared with bulk prediction. The last
column, CPU time per text, is least affected by other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import socket
import statistics
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
BULK = """
import json, sys, time
from tunesmith import Predictor
model = Predictor.load(sys.argv[1], use_cpu=True)
texts = json.load(sys.stdin)
model.predict(texts[:32])
start, cpu = time.perf_counter(), time.process_time()
labels = model.predict(texts)
print(json.dumps([labels, time.perf_counter() - start, time.process_time() - cpu]))
"""


Turn = dict[str, float]


def main() -> int:
    """Measure all servers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("texts", help="CSV or TSV file; its first column is read")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    with open(args.texts, newline="", encoding="utf-8") as lines:
        kind = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if args.texts.endswith(".tsv") else {}
        texts = [row[0] for row in csv.reader(lines, **kind)][1:1001]
    ours = [sys.executable, "-m", "tunesmith", "serve", args.run, "--port", "{port}", "--workers"]
    servers = {f"tunesmith serve --workers {n}": [*ours, str(n)] for n in args.workers}
    if not (Path(args.run) / "export.json").is_file():
        servers["FastAPI + pipeline"] = [sys.executable, "-c", PEER, str(Path(args.run) / "model"), "{port}"]
    labels: list[str] = []
    turns: dict[str, list[Turn]] = {name: [] for name in ("bulk prediction", *servers)}
    for _ in range(args.rounds):
        labels, bulk = predict_all(args.run, texts)
        turns["bulk prediction"].append(bulk)
        for name, command in servers.items():
            turns[name].append(load(command, texts, labels, args))
    print_table(turns, args)
    return 0


def print_table(turns: dict[str, list[Turn]], args: argparse.Namespace) -> None:
    """Print medians over the rounds, and sums of counts that must be 0."""
    middle = {
        name: {key: statistics.median(turn[key] for turn in some) for key in some[0]} for name, some in turns.items()
    }
    bulk = middle["bulk prediction"]["rate"]
    loads = [turn["load"] for some in turns.values() for turn in some]
    print(f"{os.cpu_count()} cores, {args.clients} clients, {args.rounds} rounds of {args.seconds:g} s; ", end="")
    print(f"load average {min(loads):.0f} to {max(loads):.0f}")
    print(
        "| | texts/s | of bulk | mean ms | p50 | p99 | p99 / mean | responses | wrong | 429 | lost | CPU ms per text |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, turn in middle.items():
        sums = " | ".join(
            f"{sum(one.get(key, 0) for one in turns[name]):.0f}" for key in ("answers", "wrong", "later", "lost")
        )
        times = [f"{turn[key]:.0f}" for key in ("mean", "p50", "p99")] if "mean" in turn else ["", "", ""]
        ratio = f"{turn['p99'] / turn['mean']:.1f}" if turn.get("mean") else ""
        cells = [name, f"{turn['rate']:,.0f}", f"{turn['rate'] / bulk:.2f}", *times, ratio, sums, f"{turn['cpu']:.2f}"]
        print(f"| {' | '.join(cells)} |")


def predict_all(run: str, texts: list[str]) -> tuple[list[str], Turn]:
    """Predict in a separate process; return labels, texts per second and CPU milliseconds per text."""
    words = [sys.executable, "-c", BULK, run]
    done = subprocess.run(words, input=json.dumps(texts), capture_output=True, text=True, check=True)
    labels, seconds, cpu = json.loads(done.stdout)
    rows = len(texts)
    return labels, {"rate": rows / seconds, "cpu": 1000 * cpu / rows, "load": os.getloadavg()[0], "answers": rows}


def load(command: list[str], texts: list[str], labels: list[str], args: argparse.Namespace) -> Turn:
    """Return client latencies in milliseconds and the server's CPU time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = [word.replace("{port}", str(port)) for word in command]
    environment = {**os.environ, "TUNESMITH_SERVE_KEY": KEY}
    server = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        times, counts, cpu = asyncio.run(_drive(port, server.pid, texts, labels, args))
    finally:
        server.terminate()
        server.wait(timeout=60)
    at = [1000 * one for one in times] or [0.0]
    spread = {"mean": statistics.fmean(at), "p50": at[len(at) // 2], "p99": at[int(0.99 * (len(at) - 1))]}
    rate = {"rate": len(times) / args.seconds, "answers": len(times), "cpu": 1000 * cpu / max(len(times), 1)}
    return {**rate, **spread, **counts, "load": os.getloadavg()[0]}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its living children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


async def _drive(
    port: int, pid: int, texts: list[str], labels: list[str], args: argparse.Namespace
) -> tuple[list[float], dict[str, int], float]:
    for _ in range(1200):  # loading the model is not measured
        try:
            if (await _ask(await asyncio.open_connection("127.0.0.1", port), port, texts[0]))[0] == 200:
                break
        except OSError:
            pass
        await asyncio.sleep(0.1)
    times: list[float] = []
    counts = {"wrong": 0, "later": 0, "lost": 0}
    before = cpu_seconds(pid)
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
    return sorted(times), counts, cpu_seconds(pid) - before


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
