"""Read the blocks of a documentation page and run them in order, in one namespace and one folder.

A ```python block is executed, a ```bash block is run in bash, and a block with a title is written to that file. A comment
`<!-- not run: reason -->` before a block skips it. `<!-- check` opens a hidden comment with Python code that checks the page's
results.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import patient
from small_embedded import embedded_replaced, small_embedded
from tunesmith.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("python", "bash")
REAL = ("docs/quickstart.md", "docs/course/01_one_batch.md")
"""Pages that run with the bundled model; others use a small replacement."""


@dataclass(frozen=True)
class Block:
    """A block of a page; `kind` is text, check, or the language of a fence."""

    kind: str
    text: str
    line: int
    title: str | None = None
    not_run: str | None = None


def read_blocks(page: Path) -> list[Block]:
    """Return the page's text, fences and hidden checks in order."""
    out: list[Block] = []
    words: list[str] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    reason: str | None = None
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"```(\w*)(?:\s+title=\"([^\"]+)\")?\s*$", line)
        if fence or line.strip() == "<!-- check":
            out.append(Block("text", "\n".join(words).strip(), at))
            words = []
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ("```" if fence else "-->"))
            kind, title = (fence[1] or "text-block", fence[2]) if fence else ("check", None)
            out.append(Block(kind, "\n".join(lines[at + 1 : end]), at + 2, title, reason))
            at, reason = end + 1, None
            continue
        note = re.match(r"<!-- not run: (.+) -->$", line.strip())
        if note:
            reason = note[1]
        elif line.strip():
            reason = None
            words.append(line)
        else:
            words.append(line)
        at += 1
    out.append(Block("text", "\n".join(words).strip(), at))
    return [b for b in out if b.kind != "text" or b.text]


def run_page(page: Path, folder: Path) -> int:
    """Run a page and return the number of blocks that ran; errors contain page and line."""
    space: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    small = None if page.relative_to(ROOT).as_posix() in REAL else small_embedded()
    with contextlib.chdir(folder), embedded_replaced(small) if small else contextlib.nullcontext():
        for block in read_blocks(page):
            if block.not_run or block.kind not in (*RUNNABLE, "check"):
                continue
            count += block.kind != "check"
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.title is not None:
                (folder / block.title).write_text(block.text + "\n", encoding="utf-8")
            elif block.kind == "bash":
                run_shell(block.text, folder, where)
            else:
                # Leading empty lines, so that a traceback shows the line in the page.
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), space)
    return count


def run_shell(text: str, folder: Path, where: str) -> None:
    """Run a block in bash, or in this process if it only contains plain `tunesmith` commands, which saves their imports."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    if all(line.startswith("tunesmith ") and not re.search(r"[|&<>$;`]", line) for line in lines):
        for line in lines:
            assert main(shlex.split(line, comments=True)[1:]) == 0, f"{where}: {line}"
        return
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=patient(420),
        check=False,
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
