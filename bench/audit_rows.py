"""Time and memory of the row audit for large files, and how they grow.

    python bench/audit_rows.py --rows 250000,500000,1000000

Each size is a process of its own: it writes a csv of made sentences (6 to 18 words, 2% exact and 2% near repeats), reads it as
`tunesmith audit --labels off` does and audits it. CPU seconds and the peak of resident memory are those of reading and audit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write_rows(path: Path, count: int) -> None:
    """Made sentences over 20,000 words with the frequencies of a language."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 10, 20_000)]
    share = 1 / (np.arange(20_000) + 10.0)
    share /= share.sum()
    last = "first row"
    with path.open("w", encoding="utf-8") as out:
        out.write("text,label\n")
        for start in range(0, count, 10_000):
            size = min(10_000, count - start)
            lengths = rng.integers(6, 19, size)
            drawn = rng.choice(20_000, int(lengths.sum()), p=share)
            kind, at = rng.random(size), 0
            for row in range(size):
                text = " ".join(words[i] for i in drawn[at : at + lengths[row]])
                at += lengths[row]
                text = last if kind[row] < 0.02 else f"{last} x" if kind[row] < 0.04 else text
                last = text
                out.write(f"{text},{'ab'[int(kind[row] * 1000) % 2]}\n")


def audit_one(path: str, cache: str) -> None:
    """Reads and audits; prints one JSON line."""
    from tunesmith.config.options import RunConfig
    from tunesmith.data.audit import audit_rows
    from tunesmith.data.read import load_data

    start, cpu = time.monotonic(), time.process_time()
    bundle = load_data(RunConfig(train_file=str(path), cache_dir=str(cache), validation_split_fraction=0))
    read = time.process_time() - cpu
    found = audit_rows(bundle.parts, bundle.columns, bundle.labels)
    numbers = {f.code: f.numbers.get("rows") for f in found if "duplicate" in f.code}
    print(
        json.dumps(
            {
                "read_cpu": read,
                "audit_cpu": time.process_time() - cpu - read,
                "wall": time.monotonic() - start,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                **numbers,
            }
        )
    )


def main() -> None:
    """One line a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="250000,500000,1000000")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        audit_one(*args.one)
        return
    for count in map(int, args.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.csv"
            write_rows(file, count)
            command = [sys.executable, __file__, "--one", str(file), folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{count:,} rows", done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
