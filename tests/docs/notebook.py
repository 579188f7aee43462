"""The course pages as one notebook: `python tests/docs/notebook.py` writes it, a test runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.pages import ROOT, read_blocks

COURSE = ROOT / "docs" / "course"
NOTEBOOK = COURSE / "course.ipynb"


def make_notebook() -> dict[str, Any]:
    """Cells of all pages in order. A file becomes `%%writefile`, shell lines `%%bash`, what is not run stays text."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": text}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))

    add(
        "markdown",
        "# The fine-tuning course, with tunesmith\n\nMade from the pages beside it. Runs top to bottom on a laptop.",
    )
    for page in sorted(COURSE.glob("0*.md")):
        for block in read_blocks(page):
            if block.kind == "check":
                continue
            if block.kind == "text":
                add("markdown", block.text)
            elif block.not_run or block.kind not in ("python", "bash"):
                add("markdown", f"```{block.kind}\n{block.text}\n```")
            elif block.title:
                add("code", f"%%writefile {block.title}\n{block.text}")
            else:
                add("code", f"%%bash\n{block.text}" if block.kind == "bash" else block.text)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def as_text() -> str:
    """The file's content."""
    return json.dumps(make_notebook(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(NOTEBOOK).write_text(as_text(), encoding="utf-8")
