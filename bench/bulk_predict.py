"""Bulk prediction with processes that are killed at random: every row once, in place, equal to the unbroken run.

python bench/bulk_predict.py MODEL [--rows 200000] [--kills 30] [--workers 4]
Writes parquet files of random short texts, predicts them once undisturbed and once while workers are killed with SIGKILL and
started again, then compares all output files byte by byte. Prints rows a second and kills.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUP_ROWS = 2_000
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
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_inputs(home / "in", args.rows)
        start = time.perf_counter()
        assert predict(args.model, home, "plain").wait() == 0
        plain = time.perf_counter() - start
        start = time.perf_counter()
        kills = disturb(args, home)
        broken = time.perf_counter() - start
        same = contents(home / "plain") == contents(home / "broken")
        parts = len(contents(home / "plain"))
    print(
        "| rows | parts | workers | kills | unbroken s | rows/s | with kills s | equal |\n|---|---|---|---|---|---|---|---|"
    )
    rate = args.rows / plain
    print(f"| {args.rows:,} | {parts} | {args.workers} | {kills} | {plain:.0f} | {rate:,.0f} | {broken:.0f} | {same} |")
    return int(not same)


def write_inputs(folder: Path, rows: int) -> None:
    """Four parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for file in range(4):
        ids = list(range(file * rows // 4, (file + 1) * rows // 4))
        texts = [" ".join(random.choices(WORDS, k=random.randint(3, 12))) for _ in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"{file}.parquet", row_group_size=GROUP_ROWS)


def predict(model: str, home: Path, output: str) -> subprocess.Popen[bytes]:
    """One worker."""
    words = ["predict", model, "--input", str(home / "in" / "*.parquet"), "--output", f"{home / output}/", "--use_cpu"]
    return subprocess.Popen([sys.executable, "-m", "tunesmith", *words], stderr=subprocess.DEVNULL)


def disturb(args: argparse.Namespace, home: Path) -> int:
    """Workers that are killed at random and replaced, until all kills are done; then one finishes undisturbed."""
    workers = [predict(args.model, home, "broken") for _ in range(args.workers)]
    kills = 0
    while kills < args.kills and any(worker.poll() is None for worker in workers):
        time.sleep(random.uniform(0.5, 6))
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
    return {p.name: p.read_bytes() for p in files}


if __name__ == "__main__":
    raise SystemExit(main())
