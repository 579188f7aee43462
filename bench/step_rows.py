"""Do step time and memory grow with the data? The same steps, from the middle of an epoch, on 20 k, 200 k and 2 M rows.

    .venv/bin/python bench/step_rows.py [--rows 20000 200000 2000000] [--rounds 3] [--steps 40] [--output FILE.json]

Token rows lie in Arrow files, memory-mapped, in chunks of 1,000 rows as the tokenizing step writes them. Each measurement
is a process of its own: it opens the rows, makes the order of the epoch, and trains a tiny BERT (2 layers, 64 dimensions:
the model hides nothing) from the middle of the epoch on. Sizes and contestants take turns. Printed are medians over the
rounds: ms a step, seconds for the order of an epoch, and peak memory, anonymous and with the mapped pages that were read,
from after the rows are opened on (bench/memory_rows.py measures reading and tokenizing as well).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memory_rows import Sampler
from records import write_record

CHUNK = 1000
BATCH = 8
CONTESTANTS = ("tunesmith", "trainer")


def write_tokens(path: Path, rows: int) -> None:
    """Rows of 10 to 80 random tokens."""
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int32())), ("token_type_ids", pa.list_(pa.int8())), ("labels", pa.int64())]
    )
    rng = np.random.default_rng(1)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, rows, CHUNK):
            count = min(CHUNK, rows - start)
            offsets = np.concatenate(([0], np.cumsum(rng.integers(10, 81, count)))).astype(np.int32)
            ids = rng.integers(1000, 9000, offsets[-1], dtype=np.int32)
            columns = [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
                for values in (ids, np.zeros(len(ids), dtype=np.int8))
            ]
            writer.write_batch(pa.record_batch([*columns, pa.array(rng.integers(0, 2, count))], schema=schema))


def open_rows(path: Path) -> Any:
    """The rows, memory-mapped."""
    from tunesmith.data.tokens import TokenRows

    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return TokenRows.from_arrow(table, known_ids=np.arange(1000, 9000))


class DictRows:
    """The rows as the Trainer wants them: one dict an index."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: found[0].tolist() for name, found in self.rows.take(np.array([index])).items()}
        return {**row, "attention_mask": [1] * len(row["input_ids"]), "labels": int(self.rows.labels[index])}


def measure(path: Path, who: str, steps: int) -> dict[str, Any]:
    """One measurement in this process."""
    import torch

    from step_turns import our_turns, their_turns
    from tunesmith.data.batches import Batches, Padding

    torch.set_num_threads(1)
    rows = open_rows(path)
    sampler = Sampler()
    sampler.start()
    order = 0.0
    if who == "tunesmith":
        batches = Batches(rows, Padding(), BATCH, 1, sampling="group_by_length")
        began = time.perf_counter()
        middle = len(batches.order(0)) // 2
        order = time.perf_counter() - began
        take = our_turns(rows, BATCH, shape="tiny", start=middle)
    else:
        take = their_turns(DictRows(rows), BATCH, shape="tiny")
    times = take(steps)
    sampler.stopped.set()
    sampler.join()
    peaks = sampler.peaks
    return {"step": statistics.median(times), "order": order, "anonymous": peaks["RssAnon"], "memory": peaks["VmRSS"]}


def ask(path: Path, who: str, steps: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--work", who, "--file", str(path), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 200_000, 2_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(measure(args.file, args.work, args.steps)))
        return
    found: dict[tuple[int, str], list[dict[str, Any]]] = {(n, who): [] for n in args.rows for who in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        files = {n: Path(folder) / f"{n}.arrow" for n in args.rows}
        for rows, file in files.items():
            write_tokens(file, rows)
        for number in range(args.rounds):
            turns = list(found.items())
            for (rows, who), answers in turns[number % len(turns) :] + turns[: number % len(turns)]:
                answers.append(ask(files[rows], who, args.steps))
    results = []
    print(f"{'rows':>10}  {'':<10} {'ms a step':>9}  {'order s':>8}  {'anonymous MB':>12}  {'all MB':>7}")
    for (rows, who), answers in found.items():
        middle = {name: statistics.median(one[name] for one in answers) for name in answers[0]}
        line = {
            "rows": rows,
            "name": who,
            "step_ms": round(1000 * middle["step"], 2),
            "order_s": round(middle["order"], 3),
            "anonymous_mb": round(middle["anonymous"]),
            "memory_mb": round(middle["memory"]),
        }
        results.append(line)
        print(
            f"{rows:>10,}  {who:<10} {line['step_ms']:>9.2f}  {line['order_s']:>8.3f}  {line['anonymous_mb']:>12}  "
            f"{line['memory_mb']:>7}"
        )
    write_record(args.output, device="cpu", results=results, note=args.note)


if __name__ == "__main__":
    main()
