"""The Python reference covers every public name, and the notebook runs from top to bottom."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from docs.notebook import NOTEBOOK
from docs.pages import ROOT, read_blocks

REFERENCE = ROOT / "docs" / "reference" / "python.md"


def test_python_reference_covers_every_public_name() -> None:
    import tunesmith

    page = REFERENCE.read_text(encoding="utf-8")
    names = set(tunesmith.__all__) - {"__version__"}
    assert [name for name in names if f"::: tunesmith.{name}\n" not in f"{page}\n" and f"`{name}`" not in page] == []
    assert set(re.findall(r"^::: tunesmith\.(\w+)$", page, re.M)) <= names
    code = "\n".join(
        line
        for block in read_blocks(REFERENCE)
        if block.kind == "python"
        for line in block.text.splitlines()
        if "import" not in line
    )
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == [], "without an example"


def test_troubleshooting_messages_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    parts = [part.strip() for message in messages for part in re.split(r"\.\.\.|\d fields|\d$", message)]
    assert len(messages) > 30
    assert [part for part in parts if part not in source] == []


def test_notebook_has_small_outputs_and_no_error() -> None:
    outputs = [o for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] for o in cell.get("outputs", [])]
    assert len(outputs) > 15
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 1_000_000


@pytest.mark.long  # its cells are those of the pages, which run in test_docs.py
@pytest.mark.filterwarnings("default")
def test_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat and nbclient (extra dev)")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (extra dev)")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    done = nbclient.NotebookClient(
        notebook, timeout=420, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert len(code) > 30
    assert all(cell.execution_count for cell in code)
