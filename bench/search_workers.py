"""Eight processes on one search, three killed: is each trial counted once, is the best that of one process, what does it cost?

    python bench/search_workers.py --workers 8 --kills 3 --trials 24

The cost is the time of the workers outside their training runs, without waiting, as a share of their time. No network needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_model import save_tiny_bert, sentences, write_csv

WORKER = r"""
import json, sys, time
from tunesmith.cli.main import main
from tunesmith.tuning import search as searching
spent = {"training": 0.0, "waiting": 0.0}
train, nap = searching.finetune, time.sleep
def timed(*a, **k):
    began = time.perf_counter()
    try:
        return train(*a, **k)
    finally:
        spent["training"] += time.perf_counter() - began
searching.finetune = timed
class Naps:
    monotonic = time.monotonic
    @staticmethod
    def sleep(seconds):
        nap(seconds)
        spent["waiting"] += seconds
searching.time = Naps
import optuna, torch, transformers, tunesmith.pipeline.prepare, tunesmith.report.compare
began = time.perf_counter()
code = main(sys.argv[2:])
spent["all"] = time.perf_counter() - began
open(sys.argv[1], "w").write(json.dumps(spent))
sys.exit(code)
"""


def search(home: Path, folder: Path, args: argparse.Namespace, faults: list[str | None]) -> list[dict[str, float]]:
    words = [
        "search",
        "--train_file",
        str(home / "rows.csv"),
        "--model_name_or_path",
        str(home / "model"),
        "--cache_dir",
        str(home / "cache"),
    ]
    words += [
        "--use_cpu",
        "--recipe",
        "hf",
        "--max_steps",
        str(args.steps),
        "--metric_for_best_model",
        "loss",
        "--trials",
        str(args.trials),
    ]
    words += [
        "--vary",
        "learning_rate=1e-5..1e-2",
        "per_device_train_batch_size=4,8,16",
        "--no_prune",
    ]
    words += ["--output_dir", str(folder), "--disable_tqdm"]
    running = []
    for number, fault in enumerate(faults):
        note = home / f"{folder.name}-{number}.json"
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"TUNESMITH_FAULT": fault} if fault else {})
        running.append(
            (
                note,
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, str(note), *words], env=environment, stdout=-3, stderr=-3
                ),
            )
        )
    for _, process in running:
        process.wait()
    return [json.loads(note.read_text()) for note, _ in running if note.exists()]


def outcome(folder: Path) -> tuple[list[list[object]], object]:
    table = json.loads((folder / "search.json").read_text())
    return [[one[k] for k in ("number", "state", "value", "options")] for one in table["trials"]], table["best"]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("workers", 8), ("kills", 3), ("trials", 24), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        save_tiny_bert(home / "model", hidden_size=128, intermediate_size=512)
        write_csv(home / "rows.csv", [{"text": t, "label": "good" if g else "bad"} for t, g in sentences(600)])
        faults: list[str | None] = [f"step.end:kill:{args.steps // 2 + 60 * k}" for k in range(args.kills)]
        began = time.perf_counter()
        spent = search(home, home / "shared", args, [*faults, *[None] * (args.workers - args.kills)])
        shared = time.perf_counter() - began
        alone = search(home, home / "alone", args, [None])
        trials, best = outcome(home / "shared")
        expected, expected_best = outcome(home / "alone")
        print(f"{args.workers} workers, {args.workers - len(spent)} killed, {shared:.0f} s")
        print(f"trials {len(trials)} of {args.trials}, each once: {[t[0] for t in trials] == list(range(args.trials))}")
        print(f"all equal to those of one worker: {trials == expected}; best {best}, of one worker {expected_best}")
        for name, rows in (("shared", spent), ("one worker", alone)):
            work = sum(r["all"] - r["waiting"] for r in rows)
            print(f"{name}: {1 - sum(r['training'] for r in rows) / work:.2%} of {work:.0f} s outside training")


if __name__ == "__main__":
    main()
