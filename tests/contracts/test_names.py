"""One name, one thing: modules, classes and public functions of src have names that are used once."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from source_tree import FILES, SRC, name_of, nodes_of, parse

LOADING = "load"
"""The one module name that packages may share: each loads its own thing."""
SHARED_FUNCTIONS = {
    "add_arguments": "cli: every verb has one",
    "run": "cli: every verb has one",
    "main": "the entry of a process: the command line, and a worker of `tunesmith bench`",
}
"""Function names that are a contract which several modules fulfil."""


def module_of(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def used_twice(places: Iterable[tuple[str, str]]) -> list[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(found.items()) if len(where) > 1]


def is_verb(path: Path) -> bool:
    """A file of `cli` with the name of a command, which may have the name of the module that does its work."""
    return path.parent.name == "cli" and any(
        isinstance(n, ast.FunctionDef) and n.name == "run" for n in parse(path).body
    )


def classes(path: Path) -> Iterator[str]:
    yield from (node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef))


def aliases(path: Path) -> Iterator[tuple[str, str]]:
    """Types that a module names by an assignment, with their definition."""
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name, ast.unparse(node.value)


def public_functions(path: Path) -> Iterator[str]:
    for node in parse(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node.name


def test_a_module_name_stands_in_one_package() -> None:
    modules = [path for path in FILES if path.parent != SRC or path.stem not in ("__init__", "__main__")]
    places = [(module_of(path), name_of(path)) for path in modules if not is_verb(path)]
    assert used_twice(place for place in places if place[0] != LOADING) == []


def test_a_class_name_is_used_once() -> None:
    named = [(name, name_of(path)) for path in FILES for name in classes(path)]
    assert used_twice(named) == []
    defined = {(name, text): name_of(path) for path in FILES for name, text in aliases(path)}
    assert used_twice(named + [(name, place) for (name, _), place in defined.items()]) == []


def test_a_public_function_name_is_used_once() -> None:
    named = [(name, name_of(path)) for path in FILES for name in public_functions(path)]
    assert used_twice(place for place in named if place[0] not in SHARED_FUNCTIONS) == []
    names = [name for name, _ in named]
    assert [name for name in SHARED_FUNCTIONS if names.count(name) < 2] == []


@cache
def names_in(module: str) -> frozenset[str]:
    """What can be imported from a module: what it defines, imports or assigns, and the modules of a package."""
    path = SRC.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset()
    found = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    for node in nodes_of(file):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return frozenset(found)


IMPORT = re.compile(r"^ *from (tunesmith[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
"""A statement by its text: to parse all tests and benchmarks takes seconds."""


def test_what_tests_and_benchmarks_import_exists() -> None:
    """A renamed function is found here, before a test file fails to load."""
    root = SRC.parents[1]
    missing = [
        f"{path.relative_to(root)}: {module} has no {name}"
        for path in (*root.glob("tests/**/*.py"), *root.glob("bench/**/*.py"))
        for module, listed in IMPORT.findall(path.read_text(encoding="utf-8"))
        for name in re.findall(r"\b\w+", re.sub(r"#.*| as \w+", "", listed))
        if name not in names_in(module)
    ]
    assert missing == []


CALLED_FROM_OUTSIDE = {
    "acquire": "optuna",
    "create_module": "importlib",
    "emit": "logging",
    "get_next": "onnxruntime",
    "_repr_html_": "a notebook",
    "_trial": "transformers",
}
"""Methods that a library calls by their name."""


def test_every_function_and_class_is_used() -> None:
    """By its name alone, anywhere in the source: what stands there once is defined and never used."""
    texts = [path.read_text(encoding="utf-8") for path in SRC.rglob("*") if path.suffix in (".py", ".j2", ".js")]
    words = Counter(re.findall(r"\w+", "\n".join(texts)))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    unused = [
        f"{name_of(path)}:{node.lineno}: {node.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, kinds) and words[node.name] == 1
        if not node.name.startswith("__") and node.name not in CALLED_FROM_OUTSIDE
    ]
    assert unused == []
    assert [name for name in CALLED_FROM_OUTSIDE if words[name] != 1] == []
