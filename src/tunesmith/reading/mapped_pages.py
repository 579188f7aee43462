"""Memory-mapped rows stay on disk, but every page that was looked at counts as memory of this process until it is given back."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

_MAPS = Path("/proc/self/maps")


def release_pages(dataset: Dataset) -> int:
    """Gives the pages of the dataset's files back to the system; returns the number of bytes of those mappings.

    Nothing is lost: the mappings are read-only views of files, and a page that is needed again is read again (from
    the page cache, as a rule). Where the system has no /proc, nothing happens.
    """
    files = {str(Path(entry["filename"]).resolve()) for entry in dataset.cache_files}
    if not files or not _MAPS.exists():
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released = 0
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        if (
            path and path[0] in files and "w" not in rights
        ):  # a written private page would be lost: those are left alone
            start, end = (int(address, 16) for address in span.split("-"))
            if advise(start, end - start, mmap.MADV_DONTNEED) == 0:
                released += end - start
    return released
