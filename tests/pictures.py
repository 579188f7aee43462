"""Blank pictures for runs whose pictures no test looks at: drawing them is three quarters of the work of a tiny run.

Figures are made all the same; what is left out is matplotlib's own work of turning one into the bytes of a file.
"""

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
    *("unit/curves/", "unit/report/", "unit/session/test_tasks.py", "course/", "docs/", "browser/", "gpu/"),
    "contracts/",  # which draw nothing and need no matplotlib
)
"""Tests that look at pictures, and one run of each task."""
_savefig: Any = None


def blank_pictures(blank: bool = True) -> None:
    """From now on figures are saved as a blank picture, or as they are."""
    global _savefig
    if _savefig is None and not blank:
        return
    from matplotlib.figure import Figure

    _savefig = _savefig or Figure.savefig
    Figure.savefig = _save_blank if blank else _savefig


def _save_blank(figure: Any, out: Any, **options: Any) -> None:
    if hasattr(out, "write"):
        out.write(BLANK[options["format"]])
    else:  # a picture that a script saves itself
        _savefig(figure, out, **options)
