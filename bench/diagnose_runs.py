"""A bank of runs made to fail on purpose, split by task, and their diagnosis: confusion matrix, false alarms.

    python bench/diagnose_runs.py --output BANK --make --seconds 300 --processes 14 --follow 0.5   # a GPU, no network
    python bench/diagnose_runs.py --output BANK --table [--list]                      # any machine, a minute
    python bench/diagnose_runs.py --output BANK --export curves.json                  # for bench/diagnose_peers.py

Making and judging are separate: --table runs the present diagnosis on the kept journals. A run that is in --output is not made
again. Rules are chosen on the tasks of one group and reported on the two others. See docs/research/diagnosis.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from diagnose_sources import GROUPS  # noqa: E402


def main() -> None:
    """Makes what is missing, prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder of the bank: bank-*.jsonl.gz")
    parser.add_argument("--make", action="store_true", help="train what is missing")
    parser.add_argument("--seconds", type=float, default=600, help="no run is started later than this")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--follow", type=float, default=0.0, help="share of runs whose first advice is followed")
    parser.add_argument("--drawn", action="store_true", help="draw the strengths of the causes: runs to fit a model to")
    parser.add_argument("--most", type=int, default=2000, help="runs at most, beside the usual one of every task")
    parser.add_argument("--merge", type=int, help="leave at most so many files")
    parser.add_argument("--table", action="store_true", help="print the tables")
    parser.add_argument("--list", action="store_true", help="print one line a run")
    parser.add_argument(
        "--group", type=_groups, default=GROUPS[:-1], help="only runs of tasks of these groups: GROUP,..."
    )
    parser.add_argument("--export", type=Path, help="write the curves for bench/diagnose_peers.py")
    parser.add_argument("--peers", type=Path, help="what bench/diagnose_peers.py wrote")
    args = parser.parse_args()
    if args.make:
        from diagnose_drawn import list_runs
        from diagnose_make import make_bank

        wanted = list_runs(args.group, drawn=args.drawn, most=args.most)
        make_bank(args.output, wanted, seconds=args.seconds, processes=args.processes, follow=args.follow)
    if args.merge:
        from diagnose_make import merge_bank

        merge_bank(args.output, args.merge)
    if not (args.table or args.list or args.export):
        return
    from diagnose_judge import export_curves, load_runs
    from diagnose_table import print_followed, print_runs, print_table

    runs, followed = load_runs(args.output, groups=args.group)
    if args.export:
        args.export.write_text(json.dumps(export_curves(runs)))
    if args.list:
        print_runs(runs)
    if args.table:
        peers = json.loads(args.peers.read_text()) if args.peers else None
        for group in args.group:
            print_table(group, [run for run in runs if run.group == group], peers)
            print_followed(group, [later for later in followed if later.run.group == group])


def _groups(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := set(found) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the groups are {', '.join(GROUPS)}")
    return found


if __name__ == "__main__":
    main()
