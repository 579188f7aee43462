"""The source as syntax trees, parsed once for all contracts and made pages: files, rooms, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "tunesmith"
FILES = sorted(SRC.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of the tree of a file."""
    return list(ast.walk(parse(path)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; "" for what is no such name. Much faster than `ast.unparse`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@cache
def import_nodes(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """The import statements of a file: (statement, whether in a function, whether for type checking only)."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool, bool]] = []
    todo: list[tuple[ast.AST, bool, bool]] = [(parse(path), False, False)]
    while todo:
        node, in_function, in_types = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append((node, in_function, in_types))
        elif not isinstance(node, ast.expr):  # an expression holds no statement
            inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            types = in_types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            todo += [(child, inside, types) for child in ast.iter_child_nodes(node)]
    return found


@cache
def imports_of(path: Path, *, into_functions: bool = True, into_types: bool = False) -> set[str]:
    """Dotted names a file imports; `from a import b` gives both `a` and `a.b`."""
    found: set[str] = set()
    package = ["tunesmith", *path.relative_to(SRC).parts[:-1]]
    for node, in_function, in_types in import_nodes(path):
        if (in_function and not into_functions) or (in_types and not into_types):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def forget_trees() -> Iterator[None]:
    """A fixture of the folders that use the trees: each later collection of garbage would walk through all of them."""
    yield
    for cached in (parse, nodes_of, import_nodes, imports_of):
        cached.cache_clear()
