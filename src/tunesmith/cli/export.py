"""Convert a trained model to ONNX and compare it with the original."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tunesmith.cli.main import raise_on_sigterm
from tunesmith.cli.parser import MODEL, add_flags
from tunesmith.inference.model_folder import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    text = "Format. onnx-int8: smaller and faster, with slightly different predictions."
    parser.add_argument("--to", required=True, choices=FORMATS, help=text)
    flags = {
        "--output FOLDER": "Folder to write. Default: RUN/export/FORMAT.",
        "--max_drop X": "Largest drop of the score that is accepted for int8. Default: 0.005.",
        "--min_agreement X": "Smallest share of equal predictions that is accepted for int8. Default: 0.99.",
        "--test_file FILE": "Labeled data for the comparison. Default: the data of the run.",
    }
    add_flags(parser, MODEL | flags, max_drop=0.005, min_agreement=0.99)


def run(args: argparse.Namespace) -> int:
    """Export, compare, print the table and return the exit code."""
    from tunesmith.cli.console import quiet_libraries
    from tunesmith.errors import ConfigError
    from tunesmith.inference.export import Tolerance, export_model_to, rows_of_file, rows_of_run
    from tunesmith.inference.model_folder import model_folder_of, read_facts
    from tunesmith.runs.folder import RunDir

    for name in ("max_drop", "min_agreement"):
        if not 0 <= getattr(args, name) <= 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is not a number from 0 to 1")
    quiet_libraries()
    raise_on_sigterm()
    source = RunDir(Path(args.run))
    folder = model_folder_of(args.run).folder
    facts = read_facts(folder)
    if args.test_file is not None:
        rows = rows_of_file(args.test_file, facts)
    elif source.config_file.is_file():
        rows = rows_of_run(source, facts)
    else:
        raise ConfigError("is not a run, so its rows are not known", where=args.run, fix="Set --test_file.")
    output = Path(args.output) if args.output else source.path / "export" / args.to
    done = export_model_to(
        args.run,
        args.to,
        output,
        rows,
        may=Tolerance(args.max_drop, args.min_agreement),
        say=lambda line: print(line, file=sys.stderr),
    )
    found = done.checked
    print(f"{args.to}, compared with the original on {found.rows:,} {found.split} rows:")
    print(f"  {found.paired.metric}: {found.score.text()}, original {found.original.text()}")
    print(f"  equal labels: {found.agreement:.2%}; largest difference of a probability: {found.max_difference:.1e}")
    print(f"\n{output}: {done.size / 1e6:.1f} MB (original {done.original_size / 1e6:.1f} MB)")
    return 0
