"""`tunesmith report RUN`: one HTML page about a run, readable without server or network."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write (default: report.html in the run folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path; gives the exit code."""
    from tunesmith.report.build import build_report
    from tunesmith.report.render import write_report
    from tunesmith.run.layout import open_run

    folder = open_run(args.run)
    path = Path(args.output) if args.output else folder.report_file
    path.parent.mkdir(parents=True, exist_ok=True)
    print(write_report(build_report(folder), path))
    return 0
