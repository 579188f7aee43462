"""Compare runs: options that differ, scores with intervals, and a paired test on the same examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.cli.parser import add_flags

if TYPE_CHECKING:
    from tunesmith.report.compare import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags = {
        "runs RUN...": "Run folders (2 to 8). Each is tested against the first.",
        "--metric NAME": "Metric to test. Default: the metric of the best checkpoint, or the first of the task.",
        "--split NAME": "Split to test on. Default: test if all runs have one, otherwise validation.",
        "-o --output FILE": "Also write a self-contained HTML page.",
    }
    add_flags(parser, flags)


def run(args: argparse.Namespace) -> int:
    """Print the comparison, write the page and return the exit code."""
    from tunesmith.report.compare import compare_runs

    if args.output:
        from tunesmith.files import require_plain

        require_plain(Path(args.output))
    comparison = compare_runs(args.runs, metric=args.metric, split=args.split)
    print(to_text(comparison))
    if args.output:
        from tunesmith.files import make_folder
        from tunesmith.report.build import write_comparison

        path = Path(args.output)
        make_folder(path.parent)
        print(f"\n{write_comparison(comparison, path)}")
    return 0


def to_text(comparison: Comparison) -> str:
    """Return the comparison as text."""
    lines = [f"{run.letter}  {run.path}" for run in comparison.runs]
    letters = [run.letter for run in comparison.runs]
    lines += ["", f"options that differ ({comparison.same_options} are the same):"]
    if comparison.differences:
        lines += _table(["", *letters], [[name, *values] for name, values in comparison.differences])
    else:
        lines.append("  none")
    rows = [
        [f"{split} {name}{'' if of is None else f' of {of!r}'}", *map(_score, cells)]
        for split, name, of, cells in comparison.scores
    ]
    if rows:
        lines += ["", "scores [95% interval]:", *_table(["", *letters], rows)]
    lines += ["", *(f"{t.a} and {t.b}: {t.sentence}" for t in comparison.tests)]
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


def _score(score: Any) -> str:
    if score is None:
        return "-"
    interval = f" [{score.low:.3f}, {score.high:.3f}]" if score.low is not None and score.high is not None else ""
    return f"{score.value:.4g}{interval}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell if len(cell) <= 44 else cell[:20] + "..." + cell[-21:] for cell in row] for row in [head, *rows]]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
