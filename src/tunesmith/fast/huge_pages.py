"""The heap of a command that trains on a CPU, in pages of 2 MiB: products wait less for addresses (decisions/0118).

What is computed stays the same to the bit. Memory that was freed stays with the process until it ends. Imports no torch: the
heap is laid out before it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

MAPS = Path("/proc/self/maps")
GPU = Path("/dev/nvidiactl")
ACCOUNTING = Path("/proc/sys/vm/overcommit_memory")
"""2: Linux counts memory that was laid out as if it were used."""
SHARE, MOST = 0.5, 2**34
"""Of the machine's free memory, and bytes: how far the heap may reach in such pages. What is not used costs nothing."""
OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 2**21
_MMAP_MAX, _TRIM_THRESHOLD, _HUGEPAGE = -4, -1, 14
"""Numbers of glibc's `mallopt` and of Linux's `madvise`."""
_ALLOWED: list[bool] = []


def allow_huge_pages() -> None:
    """The console script calls it: this process is a command's own, and its memory is laid out as the command wants."""
    _ALLOWED[:] = [True]


def use_huge_pages() -> int:
    """Lets the heap of a command lie in huge pages; bytes that it may reach so, 0 where that is not possible or of no use."""
    if not _ALLOWED or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or GPU.exists():
        return 0
    if not ACCOUNTING.is_file() or ACCOUNTING.read_text().strip() == "2":
        return 0
    if not OFFERED.is_file() or "[never]" in OFFERED.read_text():
        return 0
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Large blocks come from the heap, too, and the heap never shrinks: it is laid out once.
    if not (libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, -1)):
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    block = libc.malloc(min(int(SHARE * free), MOST))
    if block is None:
        return 0
    libc.free(block)
    start, end = _heap()
    return end - start if end > start and libc.madvise(start, end - start, _HUGEPAGE) == 0 else 0


def _heap() -> tuple[int, int]:
    """First and last address of the whole huge pages in the heap."""
    found = re.search(r"^(\w+)-(\w+) .*\[heap\]$", MAPS.read_text(), re.MULTILINE)
    start, end = (int(place, 16) for place in found.groups()) if found else (0, 0)
    return -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
