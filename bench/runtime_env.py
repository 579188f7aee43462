"""Measure an exported folder in virtual environments without torch: size, import time, first and equal predictions.

    python bench/runtime_env.py RUN/export/onnx RUN TEXTS.csv

Builds the wheel of this checkout and creates two environments in a temporary folder (needs a package index): one with the wheel
and its extra `runtime`, one with the folder's requirements.txt. Compares the output of `tunesmith predict` and `tunesmith serve`
with the run's predictions in this environment. Wall-clock and CPU times are the best of three starts, after one that writes the
bytecode.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = "(time.perf_counter(), time.process_time())"
IMPORT = f"import time; a = {CLOCKS}; from tunesmith import Predictor; b = {CLOCKS}; print(b[0] - a[0], b[1] - a[1])"
ABSENT = ("torch", "transformers", "datasets", "pyarrow", "pandas", "sklearn", "scipy")
KEY = "k" * 40


def main() -> int:
    """Print a table per environment; return 1 if a prediction differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exported")
    parser.add_argument("run")
    parser.add_argument("texts", help="CSV file with the text columns of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        call([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)])
        wheel = next(home.glob("*.whl"))
        pinned = ["--no-deps", "--no-compile", "--find-links", folder, "-r", f"{args.exported}/requirements.txt"]
        ours = labels(sys.executable, args.run, args.texts, home / "ours.csv")
        ways = {"`tunesmith[runtime]`": [f"{wheel}[runtime]"], "`requirements.txt`": pinned}
        return max(measure(args, home / str(number), way, ways[way], ours) for number, way in enumerate(ways))


def measure(args: argparse.Namespace, home: Path, way: str, install: list[str], ours: list[str]) -> int:
    """Print the table of one environment; return 1 if a prediction differs."""
    python, before, installed = make_environment(home, install)
    call([python, "-m", "tunesmith", "predict", args.exported, "--text", "a", "a"])
    call([python, "-c", IMPORT])
    imported = best(tuple(map(float, call([python, "-c", IMPORT]).split())) for _ in range(3))
    ask_once = [python, "-m", "tunesmith", "predict", args.exported, "--text", "a", "a"]
    first = best(seconds(ask_once) for _ in range(3))
    theirs = labels(python, args.exported, args.texts, home / "theirs.csv")
    starts = [serve(python, args.exported, args.texts) for _ in range(3)]
    started, served = best(times for times, _ in starts), starts[0][1]
    used = size_of(home / "env") - before
    print(f"\n| {way} | Value | Goal |\n|---|---|---|")
    print(f"| Installed size without the model | {installed / 1e6:.0f} MB | under 150 MB |")
    print(f"| Installed size with bytecode | {used / 1e6:.0f} MB | under 150 MB |")
    print(f"| import | {shown(imported)} | under 0.5 s |")
    print(f"| `predict`: start to predictions | {shown(first)} | 1 s |")
    print(f"| `serve`: start to first prediction | {shown(started)} | 1 s |")
    print(f"| `predict`: equal labels | {same(ours, theirs)} of {len(ours)} | all |")
    print(f"| `serve`: equal labels | {same(ours, served)} of {len(served)} | all |")
    return int(ours != theirs or ours[: len(served)] != served)


def make_environment(home: Path, install: list[str]) -> tuple[str, int, int]:
    """Create an environment; return its interpreter, its size before the installation, and the added bytes."""
    call([sys.executable, "-m", "venv", str(home / "env")])
    python = str(home / "env" / "bin" / "python")
    before = size_of(home / "env")
    call([python, "-m", "pip", "install", "--quiet", *install])
    for name in ABSENT:
        assert subprocess.run([python, "-c", f"import {name}"], stderr=subprocess.DEVNULL).returncode != 0, name
    return python, before, size_of(home / "env") - before


def serve(python: str, model: str, texts: str) -> tuple[tuple[float, ...], list[str]]:
    """Start the server; return the seconds until its first response, and its predicted labels."""
    with open(texts, newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[:32]
    columns = json.loads((Path(model) / "tunesmith.json").read_text(encoding="utf-8"))["text_columns"]
    body = {name: [row[column] for row in rows] for name, column in zip(("texts", "pairs"), columns, strict=False)}
    start = time.perf_counter()
    server = subprocess.Popen(
        [python, "-m", "tunesmith", "serve", model, "--port", "0"],
        env=clean() | {"TUNESMITH_SERVE_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/predict")[0].rpartition(":")[2])
        ask(port, {name: values[:1] for name, values in body.items()})
        clock = time.perf_counter() - start
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        processor = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return (clock, processor), [one["label"] for one in ask(port, body)["results"]]
    finally:
        server.terminate()
        server.wait(30)


def ask(port: int, body: dict[str, Any]) -> Any:
    """Send a request, again if the model is still loading."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for _ in range(600):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/predict", json.dumps(body), headers)
            reply = connection.getresponse()
            answer = reply.read()
        if reply.status == 200:
            return json.loads(answer)
        time.sleep(0.05)
    raise SystemExit(f"the server responds with {reply.status}: {answer[:300]!r}")


def labels(python: str, model: str, texts: str, output: Path) -> list[str]:
    """Return the predicted labels of a CSV file."""
    call([python, "-m", "tunesmith", "predict", model, "--input", texts, "--output", str(output)])
    with output.open(newline="", encoding="utf-8") as lines:
        return [row["prediction"] for row in csv.DictReader(lines)]


def same(ours: list[str], theirs: list[str]) -> int:
    """Return the number of equal predictions."""
    return sum(a == b for a, b in zip(ours, theirs, strict=False))


def seconds(command: list[str]) -> tuple[float, ...]:
    """Return the wall-clock and CPU time of a command."""

    def now() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.perf_counter(), used.ru_utime + used.ru_stime

    start = now()
    call(command)
    return tuple(after - before for before, after in zip(start, now(), strict=True))


def best(times: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the lowest wall-clock and CPU time."""
    return tuple(map(min, zip(*times, strict=True)))


def shown(times: tuple[float, ...]) -> str:
    """Return both times as text."""
    return f"{times[0]:.2f} s, CPU {times[1]:.2f} s"


def call(command: list[str]) -> str:
    """Return a command's output, or exit with the end of its errors."""
    environment = dict(os.environ) if command[0] == sys.executable else clean()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    return done.stdout


def clean() -> dict[str, str]:
    """Return the environment variables without those that configure this interpreter."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


if __name__ == "__main__":
    raise SystemExit(main())
