"""Is the board quick with 200 runs and a journal of 1,000,000 lines?

    python bench/board_load.py [--runs 200] [--lines 1000000]

Makes the runs in a temporary folder, starts `tunesmith board` over them, and measures in headless Chromium when the first
thing is painted, when curves stand, how long one appended step takes to appear, and what the server needs. Needs chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
from devtools import Browser

PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def write_run(folder: Path, steps: int, *, seed: int, ended: bool = True) -> None:
    """A journal as a run of `steps` steps leaves it, with 20 evaluations."""
    pick = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f'run_name: "run-{seed}"\nmodel_name_or_path: "bert-base-uncased"\n')
    every = max(1, steps // 20)
    with (folder / "journal.jsonl").open("w") as out:
        start = {"event": "RunStarted", "run_id": "x", "step": 0, "num_steps": steps, "steps_per_epoch": steps / 3}
        out.write(json.dumps(start | {"num_epochs": 3.0, "train_rows": 16 * steps // 3, "time": 1.7e9}) + "\n")
        for step in range(1, steps + 1):
            loss = 0.7 * math.exp(-2 * step / steps) * (0.7 + 0.6 * pick.random())
            out.write(
                f'{{"event": "StepDone", "step": {step}, "epoch": {3 * step / steps}, "loss": {loss}, "grad_norm": 1.5, '
                f'"learning_rate": 2e-05, "examples": 16, "tokens": 800, "padded_tokens": 900, "seconds": 0.05}}\n'
            )
            if step % every == 0:
                metrics = {"loss": loss, "accuracy": 0.7 + 0.2 * step / steps}
                event = {"event": "Evaluated", "step": step, "epoch": 3 * step / steps, "split": "validation"}
                out.write(json.dumps(event | {"metrics": metrics, "n": 408, "seconds": 1.0}) + "\n")
        if ended:
            out.write(json.dumps({"event": "RunEnded", "step": steps, "reason": "completed", "time": 1.7e9}) + "\n")


def start_board(root: Path, state: Path) -> tuple[subprocess.Popen[str], str]:
    """The process and its address."""
    command = [sys.executable, "-m", "tunesmith", "board", str(root), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_STATE_HOME": str(state)}
    )
    assert process.stdout is not None
    return process, next(line.strip() for line in process.stdout if "http://" in line)


def megabytes(pid: int) -> float:
    """Resident memory of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) / 1024


def measure(root: Path, work: Path, lines: int) -> list[tuple[str, str]]:
    """(what, value) in the order measured."""
    process, address = start_board(root, work / "state")
    own = address.split("/?")[0]
    found: list[tuple[str, str]] = []
    try:
        with Browser(work / "profile") as browser:
            for name in ("list, first visit", "list, again"):
                browser.open(address)
                browser.wait(f"({PAINT}) > 0")
                found.append((f"{name}: first paint", f"{browser.run(PAINT) / 1000:.2f} s"))
            rows = browser.run("document.querySelectorAll('#rows .run').length")
            found.append(("rows in the list", str(rows)))
            began = time.monotonic()
            browser.open(f"{own}/runs/million")
            browser.wait(f"({PAINT}) > 0")
            found.append((f"run page of {lines:,} lines: first paint", f"{browser.run(PAINT) / 1000:.2f} s"))
            browser.wait("document.querySelector('.plot .raw') !== null", seconds=120)
            found.append((f"run page of {lines:,} lines: curves stand after", f"{time.monotonic() - began:.2f} s"))
            found.append(("server memory with it open", f"{megabytes(process.pid):.0f} MB"))
            with (root / "million" / "journal.jsonl").open("a") as out:
                step = f'{{"event": "StepDone", "step": {lines + 7}, "epoch": 3.1, "loss": 0.1, "grad_norm": 1.5, '
                out.write(
                    step + '"learning_rate": 2e-05, "examples": 16, "tokens": 8, "padded_tokens": 9, "seconds": 0.05}\n'
                )
            began = time.monotonic()
            browser.wait(f"document.getElementById('step').textContent.startsWith('{lines + 7:,}')", seconds=60)
            found.append(("an appended step appears after", f"{time.monotonic() - began:.2f} s"))
            browser.open(f"{own}/")
            browser.wait(f"({PAINT}) > 0")
            found.append(("list while the long run is followed: first paint", f"{browser.run(PAINT) / 1000:.2f} s"))
            began = time.monotonic()
            browser.open(f"{own}/runs/million")
            browser.wait("document.querySelector('.plot .raw') !== null", seconds=60)
            found.append(("back to the long run: curves stand after", f"{time.monotonic() - began:.2f} s"))
            assert browser.console == [], browser.console
    finally:
        process.terminate()
        process.wait()
    return found


def main() -> None:
    """Makes the runs, measures, prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for k in range(args.runs - 1):
            write_run(work / "runs" / f"run-{k:03d}", 300 + 20 * (k % 50), seed=k)
        write_run(work / "runs" / "million", args.lines, seed=1, ended=False)
        size = (work / "runs" / "million" / "journal.jsonl").stat().st_size
        print(
            f"{args.runs} runs, the longest with {args.lines:,} lines ({size / 1e6:.0f} MB); {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}\n"
        )
        for what, value in measure(work / "runs", work, args.lines):
            print(f"  {what:<58} {value:>9}", flush=True)


if __name__ == "__main__":
    main()
