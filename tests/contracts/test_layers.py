"""The house of DESIGN.md section 3, walked by AST: levels, budgets, names, one home per library, torch-free rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "tunesmith"
FILES = sorted(SRC.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "events": 0,
    "findings": 0,
    "labels": 0,
    "sample": 1,
    "config": 1,
    "run": 1,
    "data": 2,
    "model": 2,
    "metrics": 2,
    "curves": 2,
    "train": 3,
    "diagnose": 3,
    "predict": 4,
    "report": 4,
    "trainer": 5,
    "finetune": 5,
    "serve": 5,
    "measure": 6,
    "cli": 7,
}
SAME_ROOM = ({"errors", "events", "findings", "labels"}, {"trainer", "finetune"})
"""Files that stand at the top of the package and share a level: they are one room."""

HOMES = {
    "datasets": ("data/",),
    "tokenizers": ("data/",),
    "transformers": ("model/", "trainer/", "measure/peers.py", "measure/agreement.py"),
    "accelerate": ("train/runtime.py",),
    "matplotlib": ("curves/",),
    "sklearn": ("metrics/",),
    "scipy": ("metrics/",),
    "pyarrow": ("data/", "predict/", "run/columns.py"),
    "yaml": ("config/",),
}
TORCH_FREE = ("errors", "events", "findings", "labels", "config", "run", "metrics", "curves", "diagnose", "report")
TORCH_FREE_FILES = ("cli/main.py", "cli/parser.py", "cli/arguments.py", "__init__.py", "__main__.py")
ENGINE = ("train/", "model/", "metrics/", "data/token_rows.py", "data/order.py", "data/batches.py")
"""What must run on a machine without `datasets`."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PUBLIC_METHODS = 300, 50, 10
FACADES = {"trainer/facade.py": "Trainer"}
"""The façade has the methods transformers has."""


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, *, into_functions: bool, into_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child) and not into_types:
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not into_functions:
            continue
        yield child
        yield from walk(child, into_functions=into_functions, into_types=into_types)


def imports_of(path: Path, *, into_functions: bool = True, into_types: bool = False) -> set[str]:
    """Dotted names a file imports; `from a import b` gives both `a` and `a.b`."""
    found: set[str] = set()
    package = ["tunesmith", *path.relative_to(SRC).parts[:-1]]
    for node in walk(parse(path), into_functions=into_functions, into_types=into_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


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


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_its_own_folder_and_lower_levels_only(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in LEVELS, f"{room} has no level: add it to DESIGN.md section 3 and to LEVELS"
    for name in imports_of(path, into_types=True):
        parts = name.split(".")
        if parts[0] != "tunesmith" or len(parts) < 2 or parts[1] not in LEVELS:
            continue
        other = parts[1]
        neighbours = other == room or any({room, other} <= names for names in SAME_ROOM)
        assert neighbours or LEVELS[other] < LEVELS[room], (
            f"{name_of(path)} (level {LEVELS[room]}) imports {name} (level {LEVELS[other]})"
        )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_library_is_imported_in_its_home_only(path: Path) -> None:
    for library in library_imports(path) & HOMES.keys():
        assert name_of(path).startswith(HOMES[library]), (
            f"{name_of(path)} imports {library}: its home is {HOMES[library]}"
        )


@pytest.mark.parametrize("path", [p for p in FILES if is_torch_free(p)], ids=name_of)
def test_a_torch_free_file_does_not_name_torch_and_loads_no_file_that_does(path: Path) -> None:
    assert "torch" not in library_imports(path)
    loaded = [name_of(file) for file in at_import(path) if "torch" in library_imports(file, into_functions=False)]
    assert loaded == []


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith(ENGINE)], ids=name_of)
def test_the_engine_runs_without_datasets(path: Path) -> None:
    assert "datasets" not in library_imports(path)
    loaded = [name_of(file) for file in at_import(path) if "datasets" in library_imports(file, into_functions=False)]
    assert loaded == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_functions_and_classes_stay_within_their_budgets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_FILE_LINES
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
        elif isinstance(node, ast.ClassDef) and FACADES.get(name_of(path)) != node.name:
            public = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            assert len(public) <= MAX_PUBLIC_METHODS, f"{node.name} has {len(public)} public methods"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_is_a_drawer(path: Path) -> None:
    assert not {part.removesuffix(".py").strip("_") for part in path.relative_to(SRC).parts} & FORBIDDEN_NAMES


@pytest.mark.parametrize("path", [p for p in FILES if p.stat().st_size], ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parse(path)), f"{name_of(path)} has no docstring"
