"""What transformers scans at each import, remembered: the same answers, asked again when a folder changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.runs import remembered
from tunesmith.runs.remembered import known_answer

SAME = """
import importlib.metadata, sys
from pathlib import Path
before = dict(importlib.metadata.packages_distributions())
from tunesmith.cli import import_scans
asked = []
import_scans.known_answer, ask = lambda name, *rest: (asked.append(name), ask(name, *rest))[1], import_scans.known_answer
import_scans.remember_scans()
import transformers
from transformers.utils import import_utils
models = Path(transformers.__file__).parent / "models"
names = import_utils.define_import_structure(models, prefix="models")
original = {f"models.{k}": v for of in import_utils.spread_import_structure(
    import_utils.create_import_structure_from_path(str(models))).values() for k, v in of.items()}
assert {k: v for of in names.values() for k, v in of.items()} == original and len(original) > 500
assert import_utils.PACKAGE_DISTRIBUTION_MAPPING == before
assert transformers.BertConfig.model_type == "bert"
assert {"names", "packages"} <= set(asked), asked
"""


@pytest.mark.slow  # two imports of transformers in new processes
def test_transformers_is_told_what_it_would_have_found(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):  # asked, then remembered
        done = subprocess.run([sys.executable, "-c", SAME], capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "tunesmith" / "answers").iterdir()} == {"names.json", "packages.json"}


def test_an_answer_is_asked_for_again_when_a_folder_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "SETTLED_NS", -(10**12))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    asked: list[int] = []

    def ask() -> dict[str, list[int]]:
        asked.append(1)
        return {"times": [len(asked)]}

    assert known_answer("folders", folders, ask) == known_answer("folders", folders, ask) == {"times": [1]}
    (folders[1] / "new").mkdir()
    assert known_answer("folders", folders, ask) == {"times": [2]}
    assert known_answer("folders", folders[:1], ask) == {"times": [3]}
    assert known_answer("none", [], ask) == known_answer("none", [], ask) == {"times": [4]}
