"""Nothing in the source runs code from files of other people. ruff bans pickle and its relatives (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])
SWITCHES = ("allow_pickle", "trust_remote_code", "shell")


def dangers_in(source: str) -> list[str]:
    """Return calls that switch on such code, or unpack an archive without checks."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [ast.unparse(c) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "extractall"]
    given = [(word.arg, word.value) for call in calls for word in call.keywords if word.arg in SWITCHES]
    off = [isinstance(value, ast.Constant) and value.value is False for _, value in given]
    return found + [
        f"{name}={ast.unparse(value)}" for (name, value), is_off in zip(given, off, strict=True) if not is_off
    ]


def test_source_contains_no_dangerous_calls() -> None:
    found = {str(path): dangers_in(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: dangers for name, dangers in found.items() if dangers} == {}


@pytest.mark.parametrize(
    "source",
    ["np.load(f, allow_pickle=True)", "load(f, trust_remote_code=own)", "zip.extractall(to)", "run(a, shell=1)"],
)
def test_dangerous_call_is_found(source: str) -> None:
    assert len(dangers_in(source)) == 1
