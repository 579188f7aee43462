"""`tunesmith curves RUN [RUN ...]`: pictures of one run or of several on the same axes, and a sketch in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder (or a journal.jsonl)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write; .png and .svg are written beside each other"
    )
    parser.add_argument("--x", choices=("step", "epoch"), default="step", help="what the horizontal axis counts")
    parser.add_argument("--no_sketch", action="store_true", help="print no sketch")


def run(args: argparse.Namespace) -> int:
    """Writes the pictures, prints the sketch and the paths; gives the exit code."""
    from tunesmith.curves.build import load_curves
    from tunesmith.curves.plot import save_curves
    from tunesmith.curves.sketch import sketch_curves

    curves = [load_curves(path) for path in args.runs]
    png, svg = _targets(args.output, args.runs)
    if not args.no_sketch:
        plain = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
        for one in curves:
            print(sketch_curves(one, ascii_only=plain), end="\n\n")
    save_curves(curves if len(curves) > 1 else curves[0], png=png, svg=svg, x=args.x)
    print(f"{png}\n{svg}")
    return 0


def _targets(output: str | None, runs: list[str]) -> tuple[Path, Path]:
    """One run: into its folder. Several: into the current folder."""
    from tunesmith.run.layout import RunDir

    if output is None:
        if len(runs) > 1:
            return Path("curves.png"), Path("curves.svg")
        folder = RunDir(Path(runs[0]).parent if Path(runs[0]).is_file() else runs[0])
        return folder.curves_png, folder.curves_svg
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix.lower() in (".png", ".svg")
    return (path.with_suffix(".png"), path.with_suffix(".svg")) if known else (Path(f"{path}.png"), Path(f"{path}.svg"))
