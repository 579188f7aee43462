"""Do few validation rows choose better weights than the last ones? Test accuracy of both, the same run otherwise.

.venv/bin/python bench/few_validation.py --tasks trec subj cr --rows 40 120 --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
TEST_ROWS = 300


Table = tuple[list[str], list[list[str]]]


def read_table(file: Path) -> Table:
    """Header and rows."""
    with file.open(encoding="utf-8", newline="") as lines:
        head, *rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return head, rows


def draw_rows(task: str, count: int, seed: int, home: Path) -> tuple[Path, Path]:
    """Writes training rows drawn by the seed, and test rows whose label is among theirs."""
    head, rows = read_table(SHARED / "data" / task / "train.tsv")
    label = head.index("label")
    train = random.Random(seed).sample(rows, count)
    known = {row[label] for row in train}
    test = [row for row in read_table(SHARED / "data" / task / "test.tsv")[1] if row[label] in known]
    files = home / "train.tsv", home / "test.tsv"
    for file, some in zip(files, (train, random.Random(0).sample(test, min(TEST_ROWS, len(test)))), strict=True):
        file.write_text("".join("\t".join(row) + "\n" for row in [head, *some]), encoding="utf-8")
    return files


def accuracy(words: list[str], run: Path) -> float:
    """On the test rows."""
    command = [sys.executable, "-m", "tunesmith", "train", *words, "--output_dir", str(run)]
    subprocess.run(command, capture_output=True, check=True)
    found: float = json.loads((run / "metrics.json").read_text())["test"]["accuracy"]["value"]
    return found


def main() -> None:
    """Prints a line for each run and the mean gain of the last weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["trec", "subj", "cr"])
    parser.add_argument("--rows", nargs="+", type=int, default=[40, 120])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--model", default=str(SHARED / "models" / "paraphrase-MiniLM-L3-v2"))
    args = parser.parse_args()
    gains = list[float]()
    with tempfile.TemporaryDirectory() as home:
        for task, seed, count in ((t, s, n) for t in args.tasks for s in args.seeds for n in args.rows):
            train, test = draw_rows(task, count, seed, Path(home))
            words = ["--train_file", str(train), "--test_file", str(test), "--seed", str(seed)]
            words += ["--model_name_or_path", args.model, "--cache_dir", f"{home}/cache", "--disable_tqdm"]
            kept = [
                accuracy([*words, "--load_best_model_at_end", way], Path(home) / f"{task}-{seed}-{count}-{way}")
                for way in ("true", "false")
            ]
            gains.append(100 * (kept[1] - kept[0]))
            print(f"{task} {count} rows, seed {seed}: best {kept[0]:.3f}, last {kept[1]:.3f}", flush=True)
    print(f"last weights: {statistics.fmean(gains):+.1f} points over {len(gains)} runs, worst {min(gains):+.1f}")


if __name__ == "__main__":
    main()
