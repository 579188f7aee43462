"""`tunesmith curves RUN [RUN ...]`: pictures of one run or of several on the same axes, and a sketch in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tunesmith.cli.parser import add_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_flag(parser, "runs RUN", "run folder (or a journal.jsonl)", nargs="+")
    add_flag(parser, "-o --output FILE", "where to write; .png and .svg are written beside each other")
    add_flag(parser, "--x", "what the horizontal axis counts", choices=("step", "epoch"), default="step")
    add_flag(parser, "--no_sketch", "print no sketch")


def run(args: argparse.Namespace) -> int:
    """Writes the pictures, prints the sketch and the paths; gives the exit code."""
    from tunesmith.report.plots import save_curves, sketch_curves
    from tunesmith.runs.curves import load_curves

    curves = [load_curves(path) for path in args.runs]
    png, svg = _targets(args.output, args.runs)
    if not args.no_sketch:
        plain = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
        for one in curves:
            print(sketch_curves(one, ascii_only=plain), end="\n\n")
    save_curves(curves if len(curves) > 1 else curves[0], png=png, svg=svg, x=args.x)
    print(f"{png}\n{svg}")
    return 0


def _free(name: str) -> Path:
    """A path in the current folder that must not exist: the user did not name it, so no file is replaced."""
    from tunesmith.errors import ConfigError

    if os.path.lexists(name):
        raise ConfigError("exists already", where=name, fix=f"Use -o {name} to replace it, or -o OTHER.png")
    return Path(name)


def _targets(output: str | None, runs: list[str]) -> tuple[Path, Path]:
    """One run: into its folder. Several: into the current folder."""
    from tunesmith.runs.folder import RunDir
    from tunesmith.runs.writing import make_folder

    if output is None:
        if len(runs) > 1:
            return _free("curves.png"), _free("curves.svg")
        folder = RunDir(Path(runs[0]).parent if Path(runs[0]).is_file() else runs[0])
        return folder.curves_png, folder.curves_svg
    path = Path(output)
    make_folder(path.parent)
    known = path.suffix.lower() in (".png", ".svg")
    return (path.with_suffix(".png"), path.with_suffix(".svg")) if known else (Path(f"{path}.png"), Path(f"{path}.svg"))
