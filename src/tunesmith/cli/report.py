"""`tunesmith report RUN`: one HTML page about a run, readable without server or network."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunesmith.cli.parser import add_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "run RUN", "run folder")
    add_flag(parser, "-o --output FILE", "where to write (default: report.html in the run folder)")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path; gives the exit code."""
    from tunesmith.report.build import build_report
    from tunesmith.report.render import write_report
    from tunesmith.runs.folder import open_run
    from tunesmith.runs.writing import make_folder, require_plain

    folder = open_run(args.run)
    path = Path(args.output) if args.output else folder.report_file
    require_plain(path)
    make_folder(path.parent)
    print(write_report(build_report(folder), path))
    return 0
