"""Test whether tunesmith and transformers.Trainer continue a run after the same faults with the same result.

    python bench/fault_table.py --output docs/research/measurements/faults.json       # two minutes; a full disk needs root

Each trial breaks a run (2-layer BERT, 48 examples, 24 steps, a checkpoint every 2 steps, dropout on), starts it again as
documented, and compares model, optimizer and log with the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, write_record

sys.path.insert(0, str(ROOT / "tests"))

from faults.trials import Ended, clean, memory_folder, rewrite_manifest
from faults.trials import run as run_trial

SAME, DIFFERENT, REFUSED, CRASHED = "identical", "silently different", "refused with a reason", "cannot resume"


@dataclass
class Side:
    """One of the two libraries; `outcomes` counts the trials of the current fault by result."""

    kind: str
    root: Path
    digest: str = ""
    save_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def run(self, folder: Path, *, fault: str | None = None, env: dict[str, str] | None = None, **job: Any) -> Ended:
        """Run a job, or continue it."""
        options = {"folder": str(folder), "fault": fault, **job.pop("options", {})}
        target = "fault_peer:main" if self.kind == "peer" else "faults.engine_trial:main"
        return run_trial(target, options, env=env or {}, **job)

    def measure(self) -> None:
        """Run the job twice without a fault: both results must be equal."""
        digests = []
        for _ in range(2):
            folder = self.root / "whole"
            ended = self.run(folder)
            assert ended.code == 0, ended.log
            digests.append(self.digest_of(folder))
            self.save_seconds = self._seconds_of_saves(folder)
            clean(folder)
        assert digests[0] == digests[1], f"{self.kind} does not repeat itself"
        self.digest = digests[0]

    def _seconds_of_saves(self, folder: Path) -> float:
        if self.kind == "peer":
            found = json.loads(Path(f"{folder}.outcome").read_text())["save_seconds"]
        else:
            events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
            found = [e["seconds"] for e in events if e["event"] == "Saved"]
        return float(sum(found) / len(found))

    def digest_of(self, folder: Path) -> str:
        """Return the digest of the final tensors and log."""
        return str(json.loads(Path(f"{folder}.outcome").read_text())["tensors"])

    def go_on(self, folder: Path, **job: Any) -> str:
        """Start the run again and count how it ends."""
        Path(f"{folder}.outcome").unlink(missing_ok=True)
        ended = self.run(folder, **job)
        if ended.code == 0:
            outcome = SAME if self.digest_of(folder) == self.digest else DIFFERENT
        else:
            outcome = REFUSED if ended.code in (4, 5, 6) else CRASHED
        self.outcomes[outcome] += 1
        return outcome

    def newest(self, folder: Path) -> Path:
        """Return the newest checkpoint."""
        return max(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))


def aimed_kills(side: Side) -> None:
    """Kill the process 30 times during a save, at random times."""
    rng = random.Random(17)
    for trial in range(30):
        folder = side.root / f"aimed-{trial}"
        delay = max(1e-6, rng.random() * side.save_seconds)
        ended = side.run(folder, fault=f"alarm_in_save:{2 + trial % 10}:{delay:.6f}")
        assert ended.code in (-signal.SIGALRM, 0), ended.log  # 0: the save was faster than the kill
        side.go_on(folder)
        clean(folder)


def signals(side: Side, **options: Any) -> None:
    """Send SIGTERM in the forward pass, the backward pass, the optimizer step and the evaluation."""
    codes = []
    for point, n in (("forward", 7), ("backward", 7), ("optimizer", 7), ("evaluate", 3), ("forward", 16)):
        folder = side.root / f"signal-{point}-{n}"
        codes.append(side.run(folder, fault=f"signal:{point}:{n}:TERM", options=options).code)
        saved = sorted(int(p.name.rsplit("-", 1)[1]) for p in folder.glob("checkpoint-*")) if folder.exists() else []
        side.remarks.append(f"{point} {n}: exit {codes[-1]}, newest checkpoint {saved[-1] if saved else 'none'}")
        side.go_on(folder, options=options)
        clean(folder)
    side.remarks = [f"exit codes {', '.join(str(c) for c in sorted(set(codes), key=str))}"]


def jit_signals(side: Side) -> None:
    """Send SIGTERM with enable_jit_checkpoint of transformers."""
    signals(side, **({"jit": True} if side.kind == "peer" else {}))


def disk_full(side: Side) -> None:
    """Run on a full disk, then again with enough space."""
    disk = side.root / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    try:
        options = {"keep": 99} if side.kind == "engine" else {}
        ended = side.run(disk / "run", options=options)
        last = ended.log.strip().splitlines()[-1] if ended.log.strip() else ""
        side.remarks.append(f"exit {ended.code}: `{last.replace(str(side.root), '...')[:150]}`")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        side.go_on(disk / "run", options=options)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def cut(share: float) -> Callable[[Path], None]:
    """Return a function that truncates a file to this share."""

    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[: int(len(data) * share)])

    return damage


def flip(file: Path) -> None:
    """Flip one bit of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    file.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": cut(0),
    "half": cut(0.5),
    "flipped bit": flip,
    "deleted": lambda file: file.unlink(),
}


def stopped_run(side: Side) -> Path:
    """Return a run that was killed after step 12; its checkpoints are 8, 10 and 12."""
    folder = side.root / "stopped"
    if not folder.exists():
        options = {"keep": 3} if side.kind == "engine" else {}
        ended = side.run(folder, fault="alarm_in_save:7:0.000001", options=options)
        assert ended.code == -signal.SIGALRM, ended.log
    return folder


def damaged_files(side: Side) -> None:
    """Empty, halve, flip a bit of, or delete each file of the newest checkpoint."""
    stopped = stopped_run(side)
    wrong = Counter[str]()
    for file in sorted(f.name for f in side.newest(stopped).iterdir()):
        for name, damage in DAMAGES.items():
            folder = side.root / "damaged"
            shutil.copytree(stopped, folder)
            damage(side.newest(folder) / file)
            if side.go_on(folder) == DIFFERENT:
                wrong[f"{file} {name}"] += 1
            clean(folder)
    if wrong:
        side.remarks.append(f"silently different: {', '.join(wrong)}")


def missing_pieces(side: Side) -> None:
    """Remove one state file (for tunesmith, with a matching manifest)."""
    pieces = {
        "peer": ["optimizer.pt", "scheduler.pt", "rng_state.pth"],
        "engine": ["optimizer.safetensors", "generators.safetensors", "state.json"],
    }
    for piece in pieces[side.kind]:
        folder = side.root / "missing"
        shutil.copytree(stopped_run(side), folder)
        newest = side.newest(folder)
        (newest / piece).unlink()
        if side.kind == "engine":
            rewrite_manifest(newest)
        side.go_on(folder)
        clean(folder)


def changed_runs(side: Side) -> None:
    """Remove four examples or change gradient accumulation before resuming."""
    for options in ({"rows": 44}, {"accumulation": 2}):
        folder = side.root / "changed"
        shutil.copytree(stopped_run(side), folder)
        side.go_on(folder, options=options)
        clean(folder)


def nan_gradient(side: Side) -> None:
    """Make gradients NaN at step 5 and later."""
    import numpy as np
    from safetensors.numpy import load_file

    folder = side.root / "nan"
    ended = side.run(folder, fault="nan_gradient:5")
    files = [f for f in folder.rglob("model.safetensors") if f.is_file()]
    bad = [f for f in files if not all(np.isfinite(t).all() for t in load_file(f).values())]
    side.outcomes[DIFFERENT if ended.code == 0 else REFUSED] += 1
    side.remarks.append(f"exit {ended.code}; {len(bad)} of {len(files)} saved weight files contain NaN")
    clean(folder)


FAULTS = (aimed_kills, signals, jit_signals, disk_full, damaged_files, missing_pieces, changed_runs, nan_gradient)


def main() -> None:
    """Run all faults on both libraries; print and write the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    root = memory_folder("table", Path("/tmp"))
    sides = {"tunesmith": Side("engine", root / "ours"), "transformers": Side("peer", root / "theirs")}
    results: list[dict[str, Any]] = []
    try:
        for side in sides.values():
            side.root.mkdir()
            side.measure()
        for fault in FAULTS:
            if fault is disk_full and os.geteuid() != 0:
                continue
            row: dict[str, Any] = {"fault": fault.__doc__}
            for name, side in sides.items():
                side.outcomes, side.remarks = Counter(), []
                fault(side)
                row[name] = {**side.outcomes, "details": side.remarks} if side.remarks else dict(side.outcomes)
            results.append(row)
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    write_record(args.output, device="cpu", results=results)


if __name__ == "__main__":
    main()
