"""The same faults on tunesmith and on transformers.Trainer, in one harness: what is left afterwards.

    python bench/fault_table.py --junit build/faults.xml --write docs/research/faults.md

Each trial breaks a run (2-layer BERT, 48 rows, 24 steps, a save every 2, dropout on), starts it again the documented way and
compares model, optimizer and log with the unbroken run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults.trials import Ended, Server, clean, memory_folder  # noqa: E402

BY_HAND = "## The identity of a run"
SAME, DIFFERENT, REFUSED, CRASHED = "same", "silently different", "refused with a reason", "cannot resume"


@dataclass
class Side:
    """One of the two engines; `outcomes` are those of the trials of the current row."""

    kind: str
    server: Server
    root: Path
    digest: str = ""
    save_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def run(self, folder: Path, *, fault: str | None = None, env: dict[str, str] | None = None, **job: Any) -> Ended:
        """One run, or its continuation."""
        options = {"folder": str(folder), "fault": fault, **job.pop("options", {})}
        return self.server.run(self.kind, options, env=env or {}, **job)

    def measure(self) -> None:
        """The unbroken run, twice: the comparison must hold without any fault."""
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
        """What the run ended with."""
        return str(json.loads(Path(f"{folder}.outcome").read_text())["tensors"])

    def go_on(self, folder: Path, **job: Any) -> str:
        """Starts the run again and notes how it ends."""
        Path(f"{folder}.outcome").unlink(missing_ok=True)
        ended = self.run(folder, **job)
        if ended.code == 0:
            outcome = SAME if self.digest_of(folder) == self.digest else DIFFERENT
        else:
            outcome = REFUSED if ended.code in (4, 5, 6) else CRASHED
        self.outcomes[outcome] += 1
        return outcome

    def newest(self, folder: Path) -> Path:
        """The newest checkpoint."""
        return max(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))


def aimed_kills(side: Side) -> None:
    """30 deaths inside a save, at a random part of its time."""
    rng = random.Random(17)
    for trial in range(30):
        folder = side.root / f"aimed-{trial}"
        delay = max(1e-6, rng.random() * side.save_seconds)
        ended = side.run(folder, fault=f"alarm_in_save:{2 + trial % 10}:{delay:.6f}")
        assert ended.code in (-signal.SIGALRM, 0), ended.log  # 0: it was done before; anything else is not this fault
        side.go_on(folder)
        clean(folder)


def signals(side: Side, **options: Any) -> None:
    """SIGTERM in the forward pass, the backward pass, the optimizer and the evaluation; the same command again."""
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
    """The same with transformers' enable_jit_checkpoint; tunesmith needs no switch."""
    signals(side, **({"jit": True} if side.kind == "peer" else {}))


def disk_full(side: Side) -> None:
    """A disk of 3 MB (kept checkpoints fill it), then one of 64 MB and the same command."""
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
    """Keeps this share of a file."""

    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[: int(len(data) * share)])

    return damage


def flip(file: Path) -> None:
    """Another bit in the middle of the file."""
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
    """A run that died behind step 12; 8, 10 and 12 are kept."""
    folder = side.root / "stopped"
    if not folder.exists():
        options = {"keep": 3} if side.kind == "engine" else {}
        ended = side.run(folder, fault="alarm_in_save:7:0.000001", options=options)
        assert ended.code == -signal.SIGALRM, ended.log
    return folder


def damaged_files(side: Side) -> None:
    """Every file of the newest checkpoint, in four ways."""
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
    """One piece of state gone (for tunesmith the manifest is rewritten so that it agrees)."""
    from faults.test_damage import rewrite_manifest

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
        side.remarks.append(f"{piece}: {side.go_on(folder)}")
        clean(folder)


def changed_runs(side: Side) -> None:
    """Four rows dropped, or another accumulation, between stop and start."""
    for name, options in {"4 rows dropped": {"rows": 44}, "accumulation 1 -> 2": {"accumulation": 2}}.items():
        folder = side.root / "changed"
        shutil.copytree(stopped_run(side), folder)
        side.remarks.append(f"{name}: {side.go_on(folder, options=options)}")
        clean(folder)


def nan_gradient(side: Side) -> None:
    """The gradient of one weight is NaN from step 5 on."""
    import numpy as np
    from safetensors.numpy import load_file

    folder = side.root / "nan"
    ended = side.run(folder, fault="nan_gradient:5")
    files = [f for f in folder.rglob("model.safetensors") if f.is_file()]
    bad = [f for f in files if not all(np.isfinite(t).all() for t in load_file(f).values())]
    side.outcomes[DIFFERENT if ended.code == 0 else REFUSED] += 1
    side.remarks.append(f"exit {ended.code}; {len(bad)} of {len(files)} saved weight files hold NaN")
    clean(folder)


ROWS: list[tuple[str, Callable[[Side], None]]] = [
    ("1", aimed_kills),
    ("5", signals),
    ("5", jit_signals),
    ("6", disk_full),
    ("8", damaged_files),
    ("9", missing_pieces),
    ("14", changed_runs),
    ("16", nan_gradient),
]


def run_rows(say: Callable[[str], None]) -> list[tuple[str, str, str, str]]:
    """(row, fault, our outcome, theirs) of every row."""
    root = memory_folder("table", Path("/tmp"))
    server = Server(root)
    sides = [Side("engine", server, root / "ours"), Side("peer", server, root / "theirs")]
    table = []
    try:
        for side in sides:
            side.root.mkdir()
            side.measure()
            say(f"{side.kind}: a save takes {side.save_seconds * 1000:.1f} ms")
        for number, row in ROWS:
            if row is disk_full and os.geteuid() != 0:
                continue
            texts = []
            for side in sides:
                side.outcomes, side.remarks = Counter(), []
                row(side)
                counts = ", ".join(f"{count} {name}" for name, count in side.outcomes.most_common())
                texts.append(counts + (f" ({'; '.join(side.remarks)})" if side.remarks else ""))
            title = " ".join((row.__doc__ or "").split())
            table.append((number, title, texts[0], texts[1]))
            say(f"{number}: {title}\n    tunesmith:    {texts[0]}\n    transformers: {texts[1]}")
    finally:
        server.close()
        shutil.rmtree(root, ignore_errors=True)
    return table


def summarise_tests(files: list[Path]) -> list[tuple[str, str, int, int, float]]:
    """(row, test, passed, not passed, seconds) from pytest's files, cases of one test together; a later file wins."""
    found: dict[tuple[str, str], list[float]] = {}
    cases = {
        (case.get("classname"), case.get("name")): case
        for file in files
        for case in ElementTree.parse(file).getroot().iter("testcase")
    }
    for case in cases.values():
        name = (case.get("name") or "").partition("[")[0]
        words = name.removeprefix("test_").split("_")
        row = str(int(words[1])) if words[0] == "row" else "-"
        title = " ".join(words[2:] if words[0] == "row" else words)
        entry = found.setdefault((row, title), [0, 0, 0.0])
        good = not any(child.tag in ("failure", "error", "skipped") for child in case)
        entry[0 if good else 1] += 1
        entry[2] += float(case.get("time") or 0)
    ordered = sorted(found.items(), key=lambda item: (item[0][0] == "-", int(item[0][0]) if item[0][0] != "-" else 0))
    return [(row, title, int(v[0]), int(v[1]), v[2]) for (row, title), v in ordered]


def write_page(
    file: Path,
    table: list[tuple[str, str, str, str]],
    tests: list[tuple[str, str, int, int, float]],
    runs: Sequence[Path],
) -> None:
    """docs/research/faults.md, whole. `runs` are pytest's files, the first that of the whole run."""
    names = ("tunesmith", "torch", "transformers", "accelerate", "safetensors")
    lines = [
        "# Reliability: what is left after a fault",
        "",
        "Made by `tests/faults/full.sh` down to the last heading, which is written by hand. "
        f"{date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{n} {version(n)}" for n in names)
        + ".",
        "",
        "Each trial breaks a run, starts it again the documented way, and compares. *same*: model, optimizer and log are, bit "
        "for bit, those of the unbroken run. *silently different*: exit code 0 and another result. *cannot resume*: the start "
        "after the fault fails. Rows are numbered as in the fault catalogue.",
        "",
        "## The same faults on both",
        "",
        "| row | fault | tunesmith | transformers.Trainer |",
        "|---|---|---|---|",
        *(f"| {a} | {b} | {c} | {d} |" for a, b, c, d in table),
        "",
    ]
    if tests:
        lines += [
            "## All fault tests",
            "",
            f"{sum(t[2] for t in tests)} passed, {sum(t[3] for t in tests)} failed or skipped, "
            f"{sum(t[4] for t in tests) / 60:.0f} minutes. Sizes of a full run: 200 kills at random moments, 30 aimed at saves, "
            "every syscall by which a run changes its folder, 100 double crashes, 80 signals at random times beside those at "
            "named points, every file of a checkpoint in 7 ways, every fsync, write, rename, link and mkdir failing once, 50 "
            "ranks killed, 200 racing saves, a resume from every step in 10 settings.",
            "",
            *_say_runs(runs),
            "| row | what holds | passed | not passed | seconds |",
            "|---|---|---|---|---|",
            *(f"| {row} | {title} | {good} | {bad} | {seconds:.0f} |" for row, title, good, bad, seconds in tests),
            "",
        ]
    file.write_text("\n".join([*lines, *_by_hand(file)]))


def _by_hand(file: Path) -> list[str]:
    """The part of the page that is written by hand, from its heading to the end."""
    text = file.read_text() if file.is_file() else ""
    return [BY_HAND + text.partition(BY_HAND)[2]] if BY_HAND in text else []


def _say_runs(files: Sequence[Path]) -> list[str]:
    """Where the table was put together from several runs, that is said, with what failed before."""
    if len(files) < 2:
        return []
    trees = [list(ElementTree.parse(file).getroot().iter("testcase")) for file in files]
    failed = [c.get("name", "") for c in trees[0] if c.find("failure") is not None or c.find("error") is not None]
    counts = ", ".join(str(len(cases)) for cases in trees)
    return [
        f"Put together from {len(files)} runs ({counts} tests): a later one stands for the tests that it repeated at full size. "
        f"In the first these had failed and were mended, the code or the test: {', '.join(failed) or 'none'}.",
        "",
    ]


def main() -> None:
    """Runs the rows, prints them, writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--junit", type=Path, nargs="*", default=[], help="results of the full test run; a later file wins"
    )
    parser.add_argument("--write", type=Path, help="page to write")
    parser.add_argument("--table", type=Path, help="JSON file of the table: read when it is there, else written")
    args = parser.parse_args()
    started = time.monotonic()
    if args.table and args.table.is_file():
        table = [(a, b, c, d) for a, b, c, d in json.loads(args.table.read_text())]
    else:
        table = run_rows(print)
        print(f"{time.monotonic() - started:.0f} s")
    if args.table:
        args.table.write_text(json.dumps(table, indent=1))
    if args.write:
        files = [file for file in args.junit if file.is_file()]
        write_page(args.write, table, summarise_tests(files), files)


if __name__ == "__main__":
    main()
