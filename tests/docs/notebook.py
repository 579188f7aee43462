"""Write and run the course pages as one notebook: python tests/docs/notebook.py. A test runs it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.pages import ROOT, read_blocks

COURSE = ROOT / "docs" / "course"
NOTEBOOK = COURSE / "course.ipynb"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MOST_LINES = 40
"""Longer outputs are truncated in the middle."""


def make_notebook() -> dict[str, Any]:
    """Return the cells of all pages: files become `%%writefile`, shell lines `%%bash`; blocks that don't run stay text."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": text}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))

    add(
        "markdown",
        "# The fine-tuning course, with tunesmith\n\nMade from the course pages. Runs top to bottom on a laptop.",
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
    return {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def run_notebook(folder: Path) -> dict[str, Any]:
    """Run the notebook in this folder; truncate long outputs and remove warnings and progress bars."""
    import nbclient
    import nbformat

    notebook = nbformat.from_dict(make_notebook())
    nbclient.NotebookClient(
        notebook, timeout=420, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    done: dict[str, Any] = json.loads(nbformat.writes(notebook))
    for cell in done["cells"]:
        cell["metadata"] = {}
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output["output_type"] == "stream" else None
            if "text" in output:
                output["text"] = _shortened("".join(output["text"]), str(folder))
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if o.get("text") != "" and o.get("name") != "stderr"]
        cell["source"] = "".join(cell["source"])
    return {**done, "metadata": {"kernelspec": KERNEL}}


def _shortened(text: str, folder: str) -> str:
    lines = [line.rpartition("\r")[2] for line in text.replace(folder, ".").splitlines()]
    kept = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES // 2], "...", *lines[-MOST_LINES // 2 :]]
    return "".join(f"{line[:200]}\n" for line in kept)


if __name__ == "__main__":
    import os
    import sys
    import tempfile

    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ.update({"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory() as place:
        text = json.dumps(run_notebook(Path(place)), indent=1, ensure_ascii=False)
    Path(NOTEBOOK).write_text(text + "\n", encoding="utf-8")
