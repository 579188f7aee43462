"""`tunesmith diagnose RUN [RUN ...]`: what the curves mean, on which evidence, and what to do next."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from tunesmith.cli.parser import add_flag
from tunesmith.findings import Finding
from tunesmith.runs.folder import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "runs RUN", "run folder", nargs="+")
    add_flag(parser, "--json", "print one JSON object per run")


def run(args: argparse.Namespace) -> int:
    """Prints the findings, the verdict first; gives the exit code."""
    from tunesmith.report.diagnosis import diagnose_run

    for path in args.runs:
        findings = diagnose_run(path)
        if args.json:
            print(json.dumps({"run": str(path), "findings": [f.to_json() for f in findings]}, allow_nan=False))
            continue
        for number, finding in enumerate(findings):
            title = finding.code.replace("_", " ")
            sure = "" if finding.confidence is None else f" (confidence {finding.confidence:.0%})"
            sure = finding.doubt or sure
            print(f"{path}: {title}{sure}" if number == 0 else f"also: {title}{sure}")
            print(f"  {finding.evidence}")
            for action in finding.advice:
                print(f"  -> {action}")
        _print_likely(findings[0].numbers.get("likelihoods", {}))
        if (command := next_command(path, findings[0])) is not None:
            print(f"  next: {command}")
        best = findings[0].numbers
        if "best_step" in best:
            print(f"  best step {best['best_step']}: {best['best_metric']} {best['best_value']:.4g}")
    return 0


def _print_likely(likely: dict[str, float]) -> None:
    """Prints the other likely verdicts with their probabilities."""
    shown = [f"{code.replace('_', ' ')} {share:.0%}" for code, share in likely.items()]
    if len(shown) > 1:
        print(f"  likely: {', '.join(shown)}")


def next_command(path: Path, finding: Finding) -> str | None:
    """The first advice as a command; None if it is not a command."""
    from tunesmith.diagnosis.advice import advised_options

    first = finding.advice[0].split(": ")[0] if finding.advice else ""
    if first.startswith("tunesmith ") and "FILE" not in first:
        return f"{first} {shlex.quote(str(path))}" if first == "tunesmith resume" else first
    options = advised_options(finding.advice[0]) if finding.advice else {}
    config = RunDir(path).config_file
    if not options or not config.is_file():
        return None
    flags = [word for name, value in options.items() for word in (f"--{name}", value or "")]
    return shlex.join(["tunesmith", "train", str(config), "--output_dir", f"{path}-next", *flags])
