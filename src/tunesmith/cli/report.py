"""`tunesmith report RUN`: one HTML page about a run, readable without server or network."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunesmith.cli.parser import user_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument(
        "-o", "--output", type=user_path, metavar="FILE", help="where to write (default: report.html in the run folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path; gives the exit code."""
    from tunesmith.report.build import build_report
    from tunesmith.report.render import write_report
    from tunesmith.run.layout import open_run
    from tunesmith.run.ownership import require_own
    from tunesmith.run.writing import make_folder

    folder = open_run(args.run)
    path = Path(args.output) if args.output else folder.report_file
    require_own(path)
    make_folder(path.parent)
    print(write_report(build_report(folder), path))
    return 0
