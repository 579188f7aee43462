"""Bulk prediction with processes that are killed at random: every row once, in place, equal to the unbroken run.

python bench/bulk_predict.py MODEL [--rows 2000000] [--kills 30] [--workers 4]
Writes parquet files of random short texts, predicts them with `--calm_workers` processes that are left alone and then with
workers that are killed with SIGKILL and started again, compares all output files byte by byte and looks for each row at its
place. Prints rows a second, kills, and the memory of a process that was left alone, early and late.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUP_ROWS = 10_000
WORDS = (
    "the",
    "film",
    "book",
    "was",
    "is",
    "very",
    "and",
    "it",
    "day",
    "good",
    "fine",
    "great",
    "bad",
    "poor",
    "awful",
)


def main() -> int:
    """Prints one table; 1 when an output differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--calm_workers", type=int, default=1)
    parser.add_argument("--pause", type=float, nargs=2, default=[2.0, 12.0], help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_inputs(home / "in", args.rows)
        start = time.perf_counter()
        memory = watch(predict(args.model, home, "plain", workers=args.calm_workers))
        plain = time.perf_counter() - start
        start = time.perf_counter()
        kills = disturb(args, home)
        broken = time.perf_counter() - start
        same = contents(home / "plain") == contents(home / "broken")
        parts = len(contents(home / "plain"))
        in_place = read_ids(home / "broken") == list(range(args.rows))
        left = [p.name for p in (home / "broken").rglob(".tmp-*")]
    print(
        "| rows | parts | alone s | rows/s | MB early | MB late | workers | kills | s with kills | equal | in place | left |"
    )
    print("|" + "---|" * 12)
    third = len(memory) // 3
    early, late = max(memory[third : 2 * third], default=0), max(memory[2 * third :], default=0)
    alone = f"| {args.rows:,} | {parts} | {plain:.0f} | {args.rows / plain:,.0f} | {early:.0f} | {late:.0f} "
    print(f"{alone}| {args.workers} | {kills} | {broken:.0f} | {same} | {in_place} | {len(left)} |")
    return int(not (same and in_place))


def watch(worker: subprocess.Popen[bytes]) -> list[float]:
    """Megabytes that a process holds, each second until it ends."""
    found = []
    while worker.poll() is None:
        time.sleep(1)
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            found += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")]
    assert worker.returncode == 0
    return found


def read_ids(folder: Path) -> list[int]:
    """The ids of all rows, in the order of the output files."""
    import pyarrow.parquet as pq

    return [i for p in sorted(folder.glob("*.parquet")) for i in pq.read_table(p, columns=["id"])["id"].to_pylist()]


def write_inputs(folder: Path, rows: int) -> None:
    """Four parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for file in range(4):
        ids = list(range(file * rows // 4, (file + 1) * rows // 4))
        texts = [" ".join(random.choices(WORDS, k=random.randint(3, 12))) for _ in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"{file}.parquet", row_group_size=GROUP_ROWS)


def predict(model: str, home: Path, output: str, *, workers: int = 1) -> subprocess.Popen[bytes]:
    """One command."""
    words = ["predict", model, "--input", str(home / "in" / "*.parquet"), "--output", f"{home / output}/", "--use_cpu"]
    words += ["--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tunesmith", *words], stderr=subprocess.DEVNULL, env=environment)


def disturb(args: argparse.Namespace, home: Path) -> int:
    """Workers that are killed at random and replaced, until all kills are done; then one finishes undisturbed."""
    workers = [predict(args.model, home, "broken") for _ in range(args.workers)]
    kills = 0
    while kills < args.kills and any(worker.poll() is None for worker in workers):
        time.sleep(random.uniform(*args.pause))
        victim = random.randrange(args.workers)
        if workers[victim].poll() is None:
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = predict(args.model, home, "broken")
            kills += 1
    for worker in workers:
        worker.wait()
    assert predict(args.model, home, "broken").wait() == 0
    return kills


def contents(folder: Path) -> dict[str, bytes]:
    """Output files by name; leftovers of killed writers have names of their own and are not outputs."""
    files = (p for p in folder.rglob("*.parquet") if not p.name.startswith(".tmp-"))
    return {p.name: hashlib.sha256(p.read_bytes()).digest() for p in files}


if __name__ == "__main__":
    raise SystemExit(main())
