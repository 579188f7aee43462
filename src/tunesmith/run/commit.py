"""The commit of the folder a command runs in, read from the files of git. No program is started: what a repository
configures (`core.fsmonitor`, hooks, filters) would run with it."""

from __future__ import annotations

import re
from pathlib import Path

from tunesmith.files import BadFile, read_plain

MAX_LINE, MAX_PACKED = 4096, 10_000_000
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"refs/[\w./+@-]{1,200}")


def current_commit(folder: Path | None = None) -> str | None:
    """The commit that is checked out; None outside git. Whether files were changed since is not known."""
    try:
        git = _git_folder(folder or Path.cwd())
        head = _line(git / "HEAD") if git is not None else ""
        if git is None or not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref: ")
        if not _REF.fullmatch(name) or ".." in name:
            return None
        shared = _shared(git)
        return next((c for home in (git, shared) if (c := _loose(home, name))), None) or _packed(shared, name)
    except (OSError, BadFile, UnicodeDecodeError):
        return None


def _git_folder(folder: Path) -> Path | None:
    """.git of this folder or of one above it; in a worktree and a submodule a file names it."""
    for home in (folder, *folder.parents):
        git = home / ".git"
        if git.is_dir():
            return git
        if git.is_file():
            return (home / _line(git).removeprefix("gitdir: ")).resolve()
    return None


def _shared(git: Path) -> Path:
    """Where branches are kept: a worktree shares those of its repository."""
    try:
        return (git / _line(git / "commondir")).resolve()
    except FileNotFoundError:
        return git


def _loose(home: Path, name: str) -> str | None:
    try:
        commit = _line(home / name)
    except FileNotFoundError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _packed(home: Path, name: str) -> str | None:
    lines = read_plain(home / "packed-refs", MAX_PACKED, follow=True).decode("utf-8").splitlines()
    found = next((line.split(" ", 1)[0] for line in lines if line.endswith(f" {name}")), "")
    return found if _COMMIT.fullmatch(found) else None


def _line(file: Path) -> str:
    return read_plain(file, MAX_LINE, follow=True).decode("utf-8").strip()
