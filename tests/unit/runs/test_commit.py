"""The commit is read from git's files. Real repositories; nothing that they configure runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tunesmith.runs.environment import current_commit, describe_environment

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *names, *words], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "deep" / "down").mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    return folder


def test_the_commit_is_that_of_git_itself(repository: Path, tmp_path: Path) -> None:
    wanted = git(repository, "rev-parse", "HEAD")
    assert current_commit(repository) == wanted
    assert current_commit(repository / "deep" / "down") == wanted
    git(repository, "pack-refs", "--all")
    assert current_commit(repository) == wanted
    git(repository, "checkout", "-q", "--detach")
    assert current_commit(repository) == wanted
    assert current_commit(tmp_path) is None


def test_a_worktree_has_its_own_commit(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    git(tmp_path / "side", "commit", "-q", "--allow-empty", "-m", "two")
    assert current_commit(tmp_path / "side") == git(tmp_path / "side", "rev-parse", "HEAD")
    assert current_commit(tmp_path / "side") != current_commit(repository)
    git(repository, "pack-refs", "--all")
    assert current_commit(tmp_path / "side") == git(tmp_path / "side", "rev-parse", "HEAD")


def test_nothing_that_a_repository_configures_is_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    git(repository, "config", "core.fsmonitor", f"touch {canary}")
    monkeypatch.chdir(repository)
    assert describe_environment()["commit"] == git(repository, "rev-parse", "HEAD")
    canary.unlink(missing_ok=True)  # git itself may have run it just now
    describe_environment()
    assert not canary.exists()
