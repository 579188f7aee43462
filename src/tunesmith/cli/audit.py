"""Find duplicates, leaks and label errors in data files before you train. Files are never modified.

Exit code 3: a file cannot be read, or --strict_data is set and there is a warning.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.cli.label_next import add_next_arguments, run_next
from tunesmith.cli.parser import add_config_arguments, add_flags, config_from_args
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.events import Finding

SPLIT_WORDS = {"train": "train", "validation": "valid|dev|val|eval", "test": "test"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, and the options for reading them."""
    flags = {
        "files FILE*": "Training, validation and test data, recognized by name or in this order.",
        "--json": "Print JSON.",
        "--labels words|probe|off": "How to find label errors. words: TF-IDF. probe: also the frozen model. Default: probe.",
        "--review_file FILE": "Write suspected label errors to this csv file, for `train --labels_file`.",
    }
    add_flags(parser, flags, labels="probe")
    add_next_arguments(parser)
    add_config_arguments(parser, ("Data", "Columns and reading", "Tokens and batches", "Model"))


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit code."""
    if any(value is not None for value in (args.unlabeled, args.next, args.output, args.output_tool)):
        return run_next(args)
    if args.files and args.config is None and "train_file" in args.given:
        raise ConfigError("files are passed both as arguments and with --train_file", fix="Use one of them.")
    args.given |= {f"{split}_file": file for split, file in name_splits(args.files).items()}
    config = config_from_args(args)
    from tunesmith.cli.console import Console, quiet_libraries
    from tunesmith.pipeline.audit import audit_files

    quiet_libraries()
    console = Console()
    # Problems that training would refuse are findings here.
    strict = config.strict_data
    config = replace(config, allow_empty_text=True, ignore_mismatched_sizes=True, strict_data=False)
    if (
        config.validation_file is None
        and config.train_file is not None
        and "validation_split_fraction" not in args.given
    ):
        config = replace(config, validation_split_fraction=0.0)
    try:
        result = audit_files(config, labels=args.labels, review_file=args.review_file, observer=console.observer())
    finally:
        console.close()
    warnings = [f for f in result.findings if f.severity != "info"]
    if args.json:
        found = {
            "rows": result.rows,
            "notes": list(result.notes),
            "findings": [f.to_json() for f in result.findings],
            "review_file": result.review_file,
        }
        print(json.dumps(found, indent=1, ensure_ascii=False, default=str))
    else:
        print("\n".join([*result.notes, "", *describe_findings(result.findings)]))
        count = f"{len(warnings)} warning{'s' * (len(warnings) != 1)}"
        print(f"\n{count}, {len(result.findings) - len(warnings)} for information")
        if result.review_file:
            print(
                f"review file: {result.review_file}. Correct its label column, then run: tunesmith train --labels_file ..."
            )
    return 3 if strict and warnings else 0


def name_splits(files: list[str]) -> dict[str, str]:
    """Return the split of each file: by name if all names contain one, otherwise in the order train, validation, test."""
    if len(files) > len(SPLIT_WORDS):
        raise ConfigError(f"got {len(files)} files", fix="Pass at most three: train, validation, test.")
    names = [Path(file).name.lower() for file in files]
    starts = {split: re.compile(rf"(?:^|[_-])(?:{words})") for split, words in SPLIT_WORDS.items()}
    found = [next((split for split in starts if starts[split].search(name)), "") for name in names]
    is_clear = all(found) and "train" in found and len(set(found)) == len(found)
    return dict(zip(found if is_clear else SPLIT_WORDS, files, strict=False))


def describe_findings(findings: list[Finding]) -> list[str]:
    """Return severity, code, evidence and advice of each finding, wrapped to the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110) if sys.stdout.isatty() else 10_000
    lines: list[str] = []
    for finding in findings:
        mark = {"error": "ERROR", "warning": "WARNING", "info": "info"}[finding.severity]
        lines += textwrap.wrap(f"{mark:<8}{finding.code}: {finding.evidence}", width, subsequent_indent=" " * 10)
        for advice in finding.advice:
            lines += textwrap.wrap(f"- {advice}", width, initial_indent=" " * 8, subsequent_indent=" " * 10)
    return lines or ["no findings"]
