"""Does memory grow with the data? The same run on a small and a large file, each in a process of its own.

    OMP_NUM_THREADS=1 nice python bench/memory_rows.py [--rows 20000 2000000] [--steps 8]

Each process reads a csv file, tokenizes it and trains a tiny BERT for a few steps through `tunesmith.pipeline.train`.
What counts is the whole resident memory (VmRSS, sampled every 10 ms), mapped file pages included, although the kernel
releases those whenever memory is needed; anonymous memory is printed beside it.
The exit status is 1 when the large file needs more than 1.3 times the memory of the small one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

LIMIT = 1.3


def write_rows(path: Path, rows: int) -> None:
    """A csv of short labelled sentences, all different."""
    from tiny_model import BAD, GOOD, PLAIN

    with path.open("w", encoding="utf-8") as out:
        out.write("text,label\n")
        for i in range(rows):
            words = [PLAIN[(i * 7 + k * k + i // 31) % len(PLAIN)] for k in range(4 + i % 9)]
            kind = (GOOD if i % 3 else BAD)[i % 5]
            out.write(f"{' '.join(words)} {kind} {i},{'good' if i % 3 else 'bad'}\n")


def read_status() -> dict[str, int]:
    """VmRSS, RssAnon and RssFile in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return {name: int(found[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon", "RssFile")}


class Sampler(threading.Thread):
    """Keeps the highest values seen, and the highest VmRSS of each phase."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks = {"VmRSS": 0, "RssAnon": 0, "RssFile": 0}
        self.by_phase: dict[str, int] = {}
        self.phase = "import"
        self.stopped = threading.Event()

    def run(self) -> None:
        """Samples until stopped."""
        while not self.stopped.is_set():
            now = read_status()
            self.peaks = {name: max(self.peaks[name], value) for name, value in now.items()}
            self.by_phase[self.phase] = max(self.by_phase.get(self.phase, 0), now["VmRSS"])
            time.sleep(0.01)


def measure(folder: Path, rows: int, steps: int) -> None:
    """One run in this process; prints a JSON line."""
    import torch

    from tiny_model import save_tiny_bert
    from tunesmith.pipeline.train import finetune
    from tunesmith.pipeline.watch import Watch

    torch.set_num_threads(1)
    model = save_tiny_bert(folder / "tiny")
    sampler = Sampler()
    sampler.start()
    started = time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        sampler.phase = what

    def say(text: str) -> None:
        sampler.phase = f"after: {text.split(':')[0]}"

    finetune(
        train_file=folder / f"{rows}.csv",
        model_name_or_path=model,
        output_dir=folder / f"run-{rows}",
        cache_dir=folder / "cache",
        max_steps=steps,
        max_eval_samples=1000,
        use_cpu=True,
        watch=Watch(say=say, progress=progress),
    )
    sampler.stopped.set()
    seconds = time.perf_counter() - started
    print(json.dumps({**sampler.peaks, "seconds": round(seconds), "phases": sampler.by_phase}))


def main() -> int:
    """Prints the table; 1 when memory grows beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs=2, default=[20_000, 2_000_000])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--phases", action="store_true", help="print the peak of each phase")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        measure(args.folder, args.rows[0], args.steps)
        return 0
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'rows':>10}  {'file MB':>7}  {'anonymous MB':>12}  {'mapped MB':>9}  {'all MB':>6}  {'seconds':>7}")
        for rows in args.rows:
            write_rows(folder / f"{rows}.csv", rows)
            command = [sys.executable, __file__, "--folder", name, "--steps", str(args.steps), "--rows", str(rows), "0"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            one = json.loads(done.stdout.splitlines()[-1])
            found.append(one)
            size = (folder / f"{rows}.csv").stat().st_size / 1e6
            print(
                f"{rows:>10,}  {size:>7.1f}  {one['RssAnon']:>12}  {one['RssFile']:>9}  {one['VmRSS']:>6}  "
                f"{one['seconds']:>7}",
                flush=True,
            )
            if args.phases:
                for phase, peak in one["phases"].items():
                    print(f"{'':>10}  {peak:>20}  {phase}")
    ratio, anonymous = (found[1][name] / found[0][name] for name in ("VmRSS", "RssAnon"))
    print(f"\npeak memory, large to small: {ratio:.2f} (limit {LIMIT}); anonymous memory alone: {anonymous:.2f}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
