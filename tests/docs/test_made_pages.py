"""Every public name has an example in the reference, and the notebook runs top to bottom."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from docs.notebook import NOTEBOOK
from docs.python_names import GROUPS


def test_every_public_name_has_an_example_that_uses_it() -> None:
    import tunesmith

    listed = [name for _, names, _ in GROUPS for name in names.split()]
    assert sorted(listed) == sorted(set(tunesmith.__all__) - {"__version__"})
    for _, names, example in GROUPS:
        code = "\n".join(line for line in example.splitlines() if "import" not in line)
        assert [name for name in names.split() if not re.search(rf"\b{name}\b", code)] == []


def test_the_notebook_ships_with_small_outputs_and_no_error() -> None:
    outputs = [o for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] for o in cell.get("outputs", [])]
    assert len(outputs) > 15
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 1_000_000


@pytest.mark.long  # its cells are those of the pages (above), which run in test_docs.py
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
