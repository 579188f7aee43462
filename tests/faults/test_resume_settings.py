"""Row 4: no fault at all. From every checkpoint of a run, in every setting, the rest is repeated bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from faults.trials import clean, fingerprint, size
from tunesmith.runs.folder import RunDir

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation 4 with a tail": {"accumulation": 4, "rows": 46},
    "random order": {"sampling": "random"},
    "early stop": {"patience": 2, "learning_rate": 5e-2},
    "bf16": {"precision": "bf16"},
    "padding-free and cut vocabulary": {"fast": True},
    "token budget": {"token_budget": 60},
    "two ranks": {"ranks": 2},
    "batches made ahead by a thread": {"ahead": 2},
    "checkpoints written by a thread": {"background": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_row_04_every_checkpoint_resumes_to_the_same_end(bench: Any, folder: Path, name: str) -> None:
    options = {**SETTINGS[name], "save_every": 1, "keep": 999}
    job = {"ranks": options.pop("ranks", 1), "timeout": 120}
    ended = bench.server.engine(folder, options=options, **job)
    assert set(ended.codes) == {0}, ended.log
    whole = fingerprint(folder)
    assert (whole["outcome"]["step"] < 24) == (name == "early stop") or name == "token budget"
    steps = [int(p.name.rsplit("-", 1)[1]) for p in RunDir(folder).checkpoints()]
    assert len(steps) >= 8
    tried = steps[:-1] if size(full=24, ci=1) >= 24 else steps[len(name) % 4 : -1 : max(1, len(steps) // 3)][:1]
    for step in tried:
        broken = Path(f"{folder}-{step}")
        shutil.copytree(folder, broken)
        for later in (s for s in steps if s > step):
            shutil.rmtree(RunDir(broken).checkpoint(later))
        shutil.rmtree(RunDir(broken).model)
        shutil.rmtree(RunDir(broken).best)
        again = bench.server.engine(broken, options=options, **job)
        assert set(again.codes) == {0}, f"from step {step}: {again.log}"
        assert fingerprint(broken) == whole, f"from step {step}"
        clean(broken)
