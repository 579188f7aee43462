"""Runs made to fail on purpose, and what the diagnosis says of them: confusion matrix, false alarms, and whether advice helps.

    python bench/diagnose_runs.py --output /tmp/diagnose --make      # trains what is missing; start two to use two cores
    python bench/diagnose_runs.py --output /tmp/diagnose --follow    # trains unhealthy runs again with their first advice
    python bench/diagnose_runs.py --output /tmp/diagnose --export curves.json
    python bench/diagnose_runs.py --output /tmp/diagnose --table [--peers verdicts.json]

Making and judging are apart: --table asks the present code about the kept run folders. A run that is in --output is not
made again, so the bench can be stopped and gone on with. Data and models come from ../shared and from the embedded sample.
Odd seeds are held out: thresholds may be chosen on even seeds only. See docs/how_to/measure_the_diagnosis.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnose_causes import CAUSES, Key, count_rows, list_runs, make_options, name_run, train_once
from diagnose_judge import Run, export_curves, find_truth, load_run, load_runs
from diagnose_table import print_runs, print_table


def claim(folder: Path) -> bool:
    """Whether this process may make the run: nobody has made it, and no live process is at it."""
    if (folder / "made.json").exists():
        return False
    mark = folder.with_name(folder.name + ".claim")
    try:
        with open(mark, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        owner = mark.read_text()
        if not owner or Path(f"/proc/{owner}").exists():
            return False
        mark.write_text(str(os.getpid()))
    return True


def make_one(folder: Path, key: Key, options: dict[str, Any], *, evaluated: bool = True) -> None:
    """Trains one run, unless it is there or another process is at it."""
    if not claim(folder):
        return
    began = time.time()
    try:
        train_once(folder, key, options, evaluated=evaluated)
    except Exception as error:  # one run less; the others are made
        print(f"{folder.name}: {error}", flush=True)
        return
    folder.with_name(folder.name + ".claim").unlink()
    print(f"{time.strftime('%H:%M:%S')} {folder.name} {time.time() - began:.0f} s", flush=True)


def plan_advice(run: Run) -> dict[str, Any] | None:
    """The options of the run with its first advice followed; None when the advice is for people."""
    from tunesmith.config.convert import convert
    from tunesmith.config.schema import list_options
    from tunesmith.diagnose.verdict import advised_options

    advice = run.findings[0].advice
    changes = advised_options(advice[0]) if advice else {}
    if not changes:
        return None
    options = {k: v for k, v in run.options.items() if changes.get(k, "") is not None}
    options |= {k: convert(v, list_options()[k].hint) for k, v in changes.items() if v is not None}
    return options


def describe(key: Key, options: dict[str, Any]) -> str:
    """What a run is made from: two runs with one description are one run."""
    return json.dumps([key[:2], count_rows(key), CAUSES[key[2]].shuffled, options], sort_keys=True)


def find_followed(output: Path, run: Run, runs: Mapping[Key, Run], options: dict[str, Any]) -> Path:
    """The folder of the run that follows the advice; another run's where that has the same rows, options and seed."""
    wanted = describe(run.key, options)
    same = (other.folder for other in runs.values() if describe(other.key, other.options) == wanted)
    model, data, _, seed = run.key
    return next(same, output / f"{model}-{data}-{seed}+{hashlib.sha256(wanted.encode()).hexdigest()[:12]}")


def follow_advice(output: Path, seeds: Sequence[int] | None) -> None:
    """Makes each unhealthy run again with its first advice."""
    runs = load_runs(output)
    for key in list_runs(seeds):
        run = runs.get(key)
        truth = find_truth(run, runs) if run is not None else None
        planned = plan_advice(run) if run is not None else None
        if run is None or truth is None or planned is None or truth.healthy or run.verdict == "healthy":
            continue
        make_one(find_followed(output, run, runs, planned), key, planned, evaluated=False)


def collect_followed(output: Path, runs: Mapping[Key, Run]) -> dict[Key, Run | None]:
    """Run -> the run that followed its first advice, None where the advice is for people; without those not made yet."""
    found: dict[Key, Run | None] = {}
    for key, run in runs.items():
        planned = plan_advice(run)
        if planned is None:
            found[key] = None
            continue
        folder = find_followed(output, run, runs, planned)
        if (folder / "made.json").exists():
            found[key] = load_run(folder)
    return found


def main() -> None:
    """Makes what is missing, prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="only these; more than the plan has are made for every cell"
    )
    parser.add_argument("--causes", nargs="+", help="only runs made in these ways")
    parser.add_argument("--make", action="store_true", help="train what is missing")
    parser.add_argument("--follow", action="store_true", help="train each unhealthy run again with its first advice")
    parser.add_argument("--export", type=Path, help="write the curves for bench/diagnose_peers.py")
    parser.add_argument("--table", action="store_true", help="print the tables")
    parser.add_argument("--list", action="store_true", help="print one line a run")
    parser.add_argument("--peers", type=Path, help="what bench/diagnose_peers.py wrote")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.make:
        for key in (k for k in list_runs(args.seeds) if args.causes is None or k[2] in args.causes):
            make_one(args.output / name_run(key), key, make_options(key))
    if args.follow:
        follow_advice(args.output, args.seeds)
    runs = {k: r for k, r in load_runs(args.output).items() if args.seeds is None or k[3] in args.seeds}
    if args.export:
        args.export.write_text(json.dumps(export_curves(runs)))
    if args.list:
        print_runs(runs)
    if args.table:
        followed = collect_followed(args.output, runs)
        peers = json.loads(args.peers.read_text()) if args.peers else None
        for half, title in ((0, "even seeds (thresholds chosen on these)"), (1, "odd seeds (held out)")):
            print_table(title, {k: r for k, r in runs.items() if k[3] % 2 == half}, runs, followed, peers)


if __name__ == "__main__":
    main()
