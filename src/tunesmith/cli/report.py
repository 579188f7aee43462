"""Write the report page and the learning curves of a run, and print the diagnosis."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.cli.parser import add_flags
from tunesmith.runs.folder import RunDir, open_run

if TYPE_CHECKING:
    from tunesmith.events import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags = {
        "run RUN": "Run folder.",
        "-o --output FILE": "File to write the page to. Default: report.html in the run folder.",
        "--json": "Print the diagnosis as JSON and write no files.",
    }
    add_flags(parser, flags)


def run(args: argparse.Namespace) -> int:
    """Write report.html, curves.png and curves.svg; print the diagnosis and the path of the page."""
    from tunesmith.events import describe_findings
    from tunesmith.files import make_folder, require_plain
    from tunesmith.report.build import build_report, write_report
    from tunesmith.report.plots import write_curves

    folder = open_run(args.run)
    page = Path(args.output) if args.output else folder.report_file
    if not args.json:
        for file in (page, folder.curves_png, folder.curves_svg):
            require_plain(file)
        make_folder(page.parent)
    report = build_report(folder)
    if args.json:
        findings = [finding.to_json() for finding in report.findings]
        print(json.dumps({"run": str(folder.path), "findings": findings}, allow_nan=False))
        return 0
    write_curves(report.curves, png=folder.curves_png, svg=folder.curves_svg)
    write_report(report, page)
    print("\n".join(describe_findings(report.findings)))
    if (command := next_command(folder, report.findings[0])) is not None:
        print(f"next: {command}")
    print(f"report: {page}")
    return 0


def next_command(folder: RunDir, finding: Finding) -> str | None:
    """Return the first advice as a command, or None if it is not one."""
    from tunesmith.diagnosis.verdict import advised_options

    first = finding.advice[0].split(": ")[0] if finding.advice else ""
    if first.startswith("tunesmith ") and "FILE" not in first:
        return f"{first} {shlex.quote(str(folder.path))}" if first == "tunesmith resume" else first
    options = advised_options(finding.advice[0]) if finding.advice else {}
    if not options or not folder.config_file.is_file():
        return None
    if "num_train_epochs" in options and "\nmax_steps: -1\n" not in folder.config_file.read_text(encoding="utf-8"):
        options["max_steps"] = "-1"  # otherwise it overrides the number of epochs
    flags = [word for name, value in options.items() for word in (f"--{name}", value or "")]
    return shlex.join(["tunesmith", "train", str(folder.config_file), "--output_dir", f"{folder.path}-next", *flags])
