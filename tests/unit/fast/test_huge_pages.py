"""The heap of a command in huge pages: asked for where they are, never where they are of no use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.fast import huge_pages

STATE = huge_pages.OFFERED
OFFERED = STATE.is_file() and "[never]" not in STATE.read_text() and not huge_pages.GPU.exists()
SCRIPT = """
import re, sys
from pathlib import Path
from tunesmith.fast.huge_pages import allow_huge_pages, use_huge_pages
assert use_huge_pages() == 0  # a process of the user's
if sys.argv[1] == "on":
    allow_huge_pages()
    assert use_huge_pages() > 2**28
assert "torch" not in sys.modules
import numpy as np
blocks = [np.ones(2**23 + n) for n in range(4)]  # of 64 MiB each
total = sum(int(one.sum()) for one in blocks)
del blocks
text = Path("/proc/self/smaps").read_text()
heap = re.findall(r"\\[heap\\].*?AnonHugePages: *(\\d+) kB", text, re.DOTALL)
print(total, sum(int(size) for size in heap) // 1024)
"""


def numbers(how: str) -> tuple[int, int]:
    """(a sum over four blocks, MiB of the heap in huge pages after they were freed) in a process of its own."""
    found = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    total, size = (int(word) for word in found.stdout.split())
    return total, size


@pytest.mark.skipif(not OFFERED, reason="the kernel has no huge pages for those who ask")
def test_large_blocks_lie_in_huge_pages_and_what_was_freed_stays() -> None:
    total, size = numbers("on")
    plain_total, plain_size = numbers("off")
    assert total == plain_total
    assert size > 128
    assert plain_size < 16


@pytest.mark.parametrize(
    "why", ["a GPU", "another system", "another library", "strict accounting", "never", "no memory"]
)
def test_nothing_is_done_where_it_is_of_no_use(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr(huge_pages, "_ALLOWED", [True])
    monkeypatch.setattr(huge_pages, "GPU", tmp_path if why == "a GPU" else tmp_path / "none")
    accounting = tmp_path / "overcommit_memory"
    accounting.write_text("2\n" if why == "strict accounting" else "0\n")
    monkeypatch.setattr(huge_pages, "ACCOUNTING", accounting)
    offered = tmp_path / "enabled"
    offered.write_text("always madvise [never]\n" if why == "never" else "always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "OFFERED", offered)
    monkeypatch.setattr(huge_pages.platform, "system", lambda: "Darwin" if why == "another system" else "Linux")
    monkeypatch.setattr(
        huge_pages.platform, "libc_ver", lambda: ("", "") if why == "another library" else ("glibc", "2.36")
    )

    class Library:
        """A libc that has no memory left."""

        def __init__(self, name: None) -> None:
            self.malloc = self.refuse
            self.free = self.madvise = self.forbidden

        class Refusal:
            def __call__(self, size: int) -> None:
                asked.append(size)

        class Forbidden:
            def __call__(self, *given: object) -> None:
                raise AssertionError("there is no block")

        refuse, forbidden = Refusal(), Forbidden()

        def mallopt(self, what: int, value: int) -> int:
            return 1

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", Library)
    assert huge_pages.use_huge_pages() == 0
    assert bool(asked) == (why == "no memory")


def test_the_heap_is_cut_to_whole_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"{0x1000:x}-{0x2000:x} r-xp 0 0 0  /bin/x\n{2**21 + 1:x}-{2**23 - 1:x} rw-p 0 0 0  [heap]\n")
    monkeypatch.setattr(huge_pages, "MAPS", maps)
    assert huge_pages._heap() == (2**22, 3 * 2**21)
    maps.write_text("")
    assert huge_pages._heap() == (0, 0)
