"""Replace plots with blank images in tests that don't look at them: drawing takes three quarters of the time of a tiny run."""

from __future__ import annotations

import base64
from typing import Any

BLANK = {
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>',
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
    ),
}
DRAWN = (
    *("unit/report/", "unit/pipeline/test_tasks.py", "course/", "browser/", "gpu/"),
    *("docs/test_made_pages.py", "docs/test_wheel.py"),
)
"""Tests that look at plots, and one run of each task."""
_savefig: Any = None
_make_chart: Any = None


def blank_pictures(blank: bool = True) -> None:
    """Save every figure as a blank image, or restore plots with `blank=False`."""
    global _savefig, _make_chart
    if _savefig is None and not blank:
        return
    from matplotlib.figure import Figure

    from tunesmith.report import plots

    _savefig, _make_chart = _savefig or Figure.savefig, _make_chart or plots._make_chart
    Figure.savefig = _save_blank if blank else _savefig
    plots._make_chart = _make_blank if blank else _make_chart


def _make_blank(key: str, title: str, alt: str, *others: Any) -> Any:
    from tunesmith.report.plots import Chart, _uri

    return Chart(key, title, alt, _uri(BLANK["svg"]), _uri(BLANK["svg"]), {})


def _save_blank(figure: Any, out: Any, **options: Any) -> None:
    if hasattr(out, "write"):
        out.write(BLANK[options["format"]])
    else:  # a script that saves a figure to a file
        _savefig(figure, out, **options)
