"""Take the screenshots of the README: the report, the board's list of runs, a run while it trains, a comparison.

    python bench/screenshots.py RUNS_DIR [--output docs/images]

RUNS_DIR contains at least two finished runs. For the live screenshot, one run's event log is replayed into a new run, next to
copies of the others. Needs Chromium. If Pillow is installed, images are reduced to 256 colors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
from devtools import Browser

LIMIT_BYTES = 300_000
LEFT_BEHIND = shutil.ignore_patterns("checkpoint-*", "best", "*.html", "*.png", "*.svg")


def start_board(root: Path, state: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the board; return the process and its address."""
    command = [sys.executable, "-m", "tunesmith", "board", str(root), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_STATE_HOME": str(state)}
    )
    assert process.stdout is not None
    own = next(line.strip() for line in process.stdout if "http://" in line).split("/?")[0]
    return process, f"{own}/?token={(state / 'tunesmith' / 'board-token').read_text()}"


def replay(run: Path, share: float, target: Path) -> None:
    """Write the first part of a run, as if it were still training."""
    target.mkdir()
    shutil.copy(run / "run.yaml", target)
    text = (target / "run.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("run_name:")]
    (target / "run.yaml").write_text("\n".join([*lines, f'run_name: "{target.name}"']), encoding="utf-8")
    if (run / "data_summary.json").exists():
        shutil.copy(run / "data_summary.json", target)
    journal = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (target / "journal.jsonl").write_bytes(b"".join(journal[: int(len(journal) * share)]))


def shrink(path: Path) -> None:
    """Reduce the number of colors, so that the README loads quickly."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(colors=192, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def take_all(browser: Browser, address: str, runs: list[str], output: Path) -> None:
    """Take all screenshots."""
    own = address.split("/?")[0]
    browser.look(width=1180, height=640)
    browser.open(address)
    browser.wait("document.getElementById('live').textContent === 'live'")
    browser.wait(
        "[...document.querySelectorAll('#rows .tone')].every((cell) => cell.textContent)"
    )  # the rows arrive one by one
    browser.screenshot(output / "board.png")
    browser.look(width=1180, height=1000)
    browser.open(f"{own}/runs/in-training")
    browser.wait("document.querySelectorAll('.plot').length >= 2 && !document.querySelector('#findings .none')")
    time.sleep(0.5)
    browser.screenshot(output / "board-run.png")
    browser.look(width=1180, height=1000, dark=True)
    browser.screenshot(output / "board-run-dark.png")
    browser.look(width=1180, height=1060)
    browser.open(f"{own}/compare?run={runs[0]}&run={runs[1]}")
    browser.screenshot(output / "compare.png")
    browser.look(width=1180, height=1840)
    browser.open(f"{own}/runs/{runs[-1]}/report")
    time.sleep(0.5)
    browser.screenshot(output / "report.png")
    browser.look(width=390, height=844)
    browser.open(f"{own}/runs/in-training")
    browser.wait("document.querySelectorAll('.plot').length >= 2")
    time.sleep(0.5)
    browser.screenshot(output / "board-phone.png")
    assert browser.console == [], browser.console
    assert browser.outside(own) == []


def main() -> None:
    """Copy the runs, serve them, and take the screenshots."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    args = parser.parse_args()
    found = sorted(p.parent for p in args.runs.glob("*/predictions.parquet"))
    if len(found) < 2:
        raise SystemExit(f"{args.runs} contains {len(found)} finished runs; two are needed")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="project-") as temporary:
        root = Path(temporary) / "runs"
        for run in found:
            shutil.copytree(run, root / run.name, ignore=LEFT_BEHIND)
        longest = max(found, key=lambda run: (run / "journal.jsonl").stat().st_size)
        replay(longest, 0.8, root / "in-training")
        process, address = start_board(root, Path(temporary) / "state")
        try:
            with Browser(Path(temporary) / "profile") as browser:
                take_all(browser, address, [run.name for run in found], args.output)
        finally:
            process.terminate()
            process.wait()
    for picture in sorted(args.output.glob("*.png")):
        shrink(picture)
        size = picture.stat().st_size
        print(f"{picture}  {size / 1000:.0f} kB{'  TOO LARGE' if size > LIMIT_BYTES else ''}")


if __name__ == "__main__":
    main()
