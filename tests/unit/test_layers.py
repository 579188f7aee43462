"""A package imports only packages below it."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "tunesmith"
LAYERS = [
    {"errors", "events", "files", "labels"},
    {"sample", "config", "metrics", "runs"},
    {"data", "models"},
    {"training", "speedups", "diagnosis"},
    {"report"},
    {"pipeline", "trainer", "inference"},
    {"integrations", "tuning"},
    {"cli"},
    {"sklearn"},
]
"""Bottom first. Packages of one layer may import each other."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunesmith."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tunesmith.")}
    return found


def test_packages_import_only_lower_layers() -> None:
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        package = path.relative_to(SRC).parts[0].removesuffix(".py")
        if package not in ("__init__", "__main__"):
            above = [name for name in imported_packages(path) if LEVEL[name] > LEVEL[package]]
            wrong += [f"{path.relative_to(SRC)} imports {name}" for name in above]
    assert wrong == []
