"""The source never unpickles, evaluates text, starts a shell, or trusts downloaded code or archives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "os.system",
    "os.popen",
    "eval",
    "exec",
}
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Keywords that must be a literal False."""


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` as written, or "" for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def faults_in(nodes: list[ast.AST]) -> Iterator[str]:
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (f"imports {a.name}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield f"imports {node.module}"
        elif isinstance(node, ast.Call):
            yield from faults_of_call(node, names)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                word = key.value if isinstance(key, ast.Constant) else None
                text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                removed = isinstance(value, ast.Call) and dotted(value.func) == "Removed"  # a message for an old option
                if word in ("trust_remote_code", "allow_pickle") and not (is_false(value) or text or removed):
                    yield f"passes {word} in a dict"


def faults_of_call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called = dotted(node.func)
    if names.get(called, called) in FORBIDDEN_CALLS:
        yield f"calls {names.get(called, called)}"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "extractall":
        yield "calls extractall"
    for keyword in node.keywords:
        if keyword.arg in FORBIDDEN_KEYWORDS and not is_false(keyword.value):
            yield f"passes {keyword.arg}={ast.unparse(keyword.value)}"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_source_contains_no_dangerous_calls() -> None:
    found = {p.relative_to(ROOT).as_posix(): list(faults_in(nodes_of(p))) for p in FILES}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import yaml\nyaml.load('x', Loader=yaml.SafeLoader)",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=flag)",
        "AutoModel.from_pretrained('x', **{'trust_remote_code': True})",
        "archive.extractall('x')",
        "import os\nos.system('ls')",
        "from os import system as run\nrun('ls')",
    ],
)
def test_lint_finds_each_dangerous_call(source: str) -> None:
    assert list(faults_in(list(ast.walk(ast.parse(source))))) != []


@pytest.mark.parametrize("source", ["model.eval()", "np.load('x', allow_pickle=False)", "f(trust_remote_code=False)"])
def test_lint_accepts_harmless_code(source: str) -> None:
    assert list(faults_in(list(ast.walk(ast.parse(source))))) == []
