"""The house of DESIGN.md section 3, walked by AST: levels, budgets, names, one home per library, torch-free rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import source_tree
from patience import patient
from source_tree import FILES, SRC, imports_of, name_of, nodes_of, parse, room_of

LEVELS = {
    "errors": 0,
    "events": 0,
    "files": 0,
    "findings": 0,
    "labels": 0,
    "sample": 1,
    "config": 1,
    "metrics": 1,
    "run": 1,
    "reading": 2,
    "tokens": 2,
    "encoder": 2,
    "curves": 2,
    "ranks": 3,
    "engine": 3,
    "fast": 3,
    "keep": 3,
    "audit": 3,
    "diagnose": 3,
    "predict": 4,
    "recipes": 4,
    "report": 4,
    "bulk": 5,
    "session": 5,
    "trainer": 5,
    "export": 6,
    "serve": 6,
    "ray": 6,
    "spark": 6,
    "measure": 6,
    "tuning": 6,
    "cli": 7,
    "notebook": 8,
}
SAME_ROOM = (
    {"errors", "events", "files", "findings", "labels"},
    {"config", "metrics"},
    {"reading", "tokens"},
    {"ranks", "engine", "fast", "keep"},
    {"trainer", "session"},
)
"""Rooms that share a level and may import each other."""

HOMES = {
    "datasets": ("reading/", "tokens/", "measure/glue_script.py"),
    "peft": ("encoder/families.py",),
    "tokenizers": ("tokens/",),
    "onnx": ("export/",),
    "onnxruntime": ("export/", "predict/graph_network.py"),
    "optuna": ("tuning/trial_store.py", "trainer/trials.py"),
    "openvino": ("export/", "predict/graph_network.py"),
    "transformers": (
        "encoder/",
        "fast/",
        "trainer/",
        "measure/peers.py",
        "measure/same_maths.py",
        "measure/glue_script.py",
    ),
    "accelerate": ("ranks/runtime.py",),
    "matplotlib": ("curves/",),
    "sklearn": ("metrics/", "audit/", "notebook/", "recipes/word_floor.py", "measure/glue_script.py"),
    "scipy": ("metrics/",),
    "pyarrow": ("reading/", "tokens/", "predict/", "bulk/", "audit/text_survey.py", "run/reader.py"),
    "fsspec": ("bulk/places.py",),
    "pyspark": ("spark.py",),
    "yaml": ("config/",),
}
TORCH_FREE = (
    "errors",
    "events",
    "files",
    "findings",
    "labels",
    "config",
    "run",
    "metrics",
    "curves",
    "audit",
    "diagnose",
    "report",
)
TORCH_FREE_FILES = ("cli/main.py", "cli/parser.py", "__init__.py", "__main__.py")
ENGINE = (
    *("engine/", "fast/", "ranks/", "keep/", "encoder/", "metrics/"),
    *("tokens/token_rows.py", "tokens/batches.py"),
)
"""What must run on a machine without `datasets`."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PUBLIC_METHODS = 300, 50, 10
FACADES = {"trainer/facade.py": "Trainer"}
"""The façade has the methods transformers has."""


def library_imports(path: Path, **options: bool) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path, **options)}


def at_import(path: Path) -> set[Path]:
    """Files of the package loaded when this one is imported, itself among them."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        for name in imports_of(here, into_functions=False):
            parts = name.split(".")
            if parts[0] == "tunesmith":
                stem = SRC.joinpath(*parts[1:])
                todo += [
                    file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file() and stem != SRC
                ]
    return seen


def is_torch_free(path: Path) -> bool:
    return room_of(path) in TORCH_FREE or name_of(path) in TORCH_FREE_FILES


def test_a_file_imports_its_own_folder_and_lower_levels_only() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert rooms <= LEVELS.keys(), "add the new room to DESIGN.md section 3 and to LEVELS"
    assert [fault for path in FILES for fault in imports_upwards(path)] == []


def imports_upwards(path: Path) -> Iterator[str]:
    room = room_of(path)
    for name in imports_of(path, into_types=True) if room in LEVELS else ():
        parts = name.split(".")
        if parts[0] != "tunesmith" or len(parts) < 2 or parts[1] not in LEVELS:
            continue
        other = parts[1]
        neighbours = other == room or any({room, other} <= names for names in SAME_ROOM)
        if not neighbours and LEVELS[other] >= LEVELS[room]:
            yield f"{name_of(path)} (level {LEVELS[room]}) imports {name} (level {LEVELS[other]})"


def test_a_library_is_imported_in_its_home_only() -> None:
    strays = {
        f"{name_of(path)} imports {library}: its home is {HOMES[library]}"
        for path in FILES
        for library in library_imports(path) & HOMES.keys()
        if not name_of(path).startswith(HOMES[library])
    }
    assert strays == set()


def names_or_loads(library: str, paths: list[Path]) -> list[str]:
    """Files that import a library somewhere, or load a file that imports it at once."""
    naming = {path for path in FILES if library in library_imports(path, into_functions=False)}
    inside = [name_of(path) for path in paths if library in library_imports(path)]
    return inside + [f"{name_of(path)} -> {name_of(file)}" for path in paths for file in at_import(path) & naming]


def test_a_torch_free_file_does_not_name_torch_and_loads_no_file_that_does() -> None:
    assert names_or_loads("torch", [p for p in FILES if is_torch_free(p)]) == []


@pytest.mark.parametrize("library", ["torch", "transformers", "datasets", "pyarrow"])
def test_what_predicts_with_an_exported_model_loads_no_file_that_names(library: str) -> None:
    naming = {path for path in FILES if library in library_imports(path, into_functions=False)}
    assert [name_of(file) for file in at_import(SRC / "predict" / "predictor.py") & naming] == []


def test_importing_all_torch_free_modules_does_not_import_torch() -> None:
    modules = [
        name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in FILES if is_torch_free(p)
    ]
    modules = [f"tunesmith.{m}" if m != "__init__" else "tunesmith" for m in modules if m != "__main__"]
    code = (
        "import sys, importlib\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_engine_runs_without_datasets() -> None:
    assert names_or_loads("datasets", [p for p in FILES if name_of(p).startswith(ENGINE)]) == []


def test_files_functions_and_classes_stay_within_their_budgets() -> None:
    assert [fault for path in FILES for fault in over_budget(path)] == []


def over_budget(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines >= MAX_FILE_LINES:
        yield f"{name_of(path)} has {lines} lines"
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= MAX_FUNCTION_LINES:
                yield f"{name_of(path)}: {node.name} has {lines} lines"
        elif isinstance(node, ast.ClassDef) and FACADES.get(name_of(path)) != node.name:
            public = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            if len(public) > MAX_PUBLIC_METHODS:
                yield f"{name_of(path)}: {node.name} has {len(public)} public methods"


def test_no_module_is_a_drawer() -> None:
    words = {name_of(path): {part.strip("_") for part in path.relative_to(SRC).with_suffix("").parts} for path in FILES}
    assert [name for name, parts in words.items() if parts & FORBIDDEN_NAMES] == []


def test_every_module_has_a_docstring() -> None:
    assert [name_of(p) for p in FILES if p.stat().st_size and not ast.get_docstring(parse(p))] == []


def test_the_walks_find_offenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_tree, "SRC", tmp_path)
    path = tmp_path / "config" / "utils.py"
    path.parent.mkdir()
    body = "\n".join(["    x = 1"] * MAX_FUNCTION_LINES)
    path.write_text("import torch\nfrom tunesmith.cli import main\ndef long():\n" + body + "\n" * MAX_FILE_LINES)
    assert list(imports_upwards(path)) != []
    assert len(list(over_budget(path))) == 2
    assert is_torch_free(path)
    assert "torch" in library_imports(path)
