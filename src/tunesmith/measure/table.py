"""The results of a contest as a table for a person and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.measure.contest import CONTESTANTS, Result

HEAD = (
    "",
    "ms a step",
    "rows/s",
    "real tokens/s",
    "of the products",
    "of the copies",
    "peak MB",
    "start s",
    "times the first",
)


@dataclass(frozen=True)
class Line:
    """One contestant in numbers. `of_limit` is the share of the measured matrix rate, counting real tokens only,
    `of_copies` that of the measured traffic, counting what a step must move at least.
    """

    name: str
    step_ms: float
    rows_per_second: float
    tokens_per_second: float
    of_limit: float
    of_copies: float
    peak_mb: float
    start_seconds: float
    ratio: float
    """Seconds a row over those of the first line: above 1 is slower than it."""


def make_lines(
    results: list[Result], *, steps: int, operations: float, moved: float, matrix_rate: float, copy_rate: float
) -> list[Line]:
    """One line for each contestant that ran, in the order given. `operations` of a token, `moved` bytes of a step."""
    ran = [one for one in results if one.failure is None]
    first = ran[0].per_second("rows")
    return [
        Line(
            CONTESTANTS[one.kind],
            1000 * one.per_step(steps),
            one.per_second("rows"),
            one.per_second("tokens"),
            one.per_second("tokens") * operations / matrix_rate,
            moved / one.per_step(steps) / (2 * copy_rate),
            one.peak_bytes / 1e6,
            one.start,
            first / one.per_second("rows"),
        )
        for one in ran
    ]


def failures_of(results: list[Result]) -> dict[str, str]:
    """Name and reason of those that did not run."""
    return {CONTESTANTS[one.kind]: one.failure for one in results if one.failure is not None}


def format_lines(lines: list[Line], failures: dict[str, str] | None = None) -> str:
    """Aligned columns; a line of words for each that did not run."""
    cells = [HEAD] + [
        (
            line.name,
            f"{line.step_ms:.1f}",
            f"{line.rows_per_second:,.1f}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.of_limit:.0%}",
            f"{line.of_copies:.0%}",
            f"{line.peak_mb:,.0f}",
            f"{line.start_seconds:.1f}",
            f"{line.ratio:.2f}",
        )
        for line in lines
    ]
    first = max(len(row[0]) for row in [*cells, *([name] for name in failures or ())])
    told = [f"{name.ljust(first)}  did not run: {reason}" for name, reason in (failures or {}).items()]
    return "\n".join([*aligned(cells, first), *told])


def aligned(cells: Sequence[Sequence[str]], first: int = 0) -> list[str]:
    """Lines of a table: the first column, at least so wide, to the left, the others to the right."""
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    widths[0] = max(first, widths[0])
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]


def lines_to_json(lines: list[Line], **facts: Any) -> dict[str, Any]:
    """Everything for a file."""
    return {**facts, "contestants": [asdict(line) for line in lines]}
