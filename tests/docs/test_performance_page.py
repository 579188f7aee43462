"""docs/performance.md says what the files of docs/performance say, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from docs.pages import ROOT


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """bench/performance_plot.py as a module."""
    sys.path.insert(0, str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("performance_plot", ROOT / "bench" / "performance_plot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "bench"))


def test_every_table_is_the_one_its_file_makes(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.render_page(page) == page, "run bench/performance_plot.py"


def test_every_file_has_its_table_and_what_it_takes_to_repeat_it(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    tables = set(re.findall(r"<!-- table: (\w+) -->", page))
    files = {file.stem for file in script.RECORDS.glob("*.json")}
    assert files
    assert files <= tables
    for name in files:
        record = script.read_record(name)
        assert record["date"]
        assert "torch" in record.get("versions", record)


def test_a_changed_figure_changes_the_page(script: ModuleType, tmp_path: Path) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    for file in script.RECORDS.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert script.render_page(page, tmp_path) == page
    rows = json.loads((tmp_path / "rows_cpu.json").read_text())
    rows["results"][0]["step_ms"] += 1
    (tmp_path / "rows_cpu.json").write_text(json.dumps(rows))
    assert script.render_page(page, tmp_path) != page
    (tmp_path / "rows_cpu.json").unlink()
    assert "Not measured yet" in script.render_page(page, tmp_path)


def test_the_picture_is_drawn_from_whatever_was_measured(script: ModuleType, tmp_path: Path) -> None:
    for file in script.RECORDS.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = len(script.draw(tmp_path).axes)
    for other in ("sweep", "predict"):
        name = f"{other}_h200" + ("_bf16" if other == "predict" else "")
        (tmp_path / f"{name}.json").write_bytes((script.RECORDS / f"{other}_cpu.json").read_bytes())
    assert len(script.draw(tmp_path).axes) == 6
    assert whole in (3, 6)
    (tmp_path / "rows_cpu.json").unlink()
    script.draw(tmp_path)
