"""A sealed folder that the user's own code changed after it was published: noticed, and sealed as it is now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.run.remembered import hash_file
from tunesmith.run.sealed import MANIFEST, manifest_bytes, read_manifest
from tunesmith.run.writing import fsync_file, fsync_folder, write_file

CHANGED = "changed_afterwards"
"""Key of the manifest: files whose content is not what the run wrote."""
SMALL = 16 << 20
"""Bytes up to which a file is hashed again: it may have been rewritten within one tick of the disk's clock."""

Mark = tuple[int, int, int]


@dataclass(frozen=True)
class FolderWatch:
    """A folder as it was: its manifest, and inode, size and time of change of every file."""

    folder: Path
    manifest: dict[str, Any]
    marks: dict[str, Mark]

    def changed(self) -> list[str]:
        """Files that were added, changed or removed since then."""
        now, stored = _marks(self.folder), self.manifest["files"]

        def same(name: str) -> bool:
            if name not in now or name not in stored or now[name][1] != stored[name]["size"]:
                return False
            if now[name][1] <= SMALL:
                return hash_file(self.folder / name) == str(stored[name]["sha256"])
            return now[name] == self.marks.get(name)

        return sorted(name for name in now.keys() | stored.keys() if not same(name))

    def seal(self, changed: Iterable[str], *, altered: Iterable[str]) -> None:
        """Writes a manifest of the folder as it is now; `altered` are named in it as not being what the run wrote."""
        known = {n: e for n, e in self.manifest["files"].items() if n not in set(changed)}
        entries = {}
        for name, (_, size, _) in sorted(_marks(self.folder).items()):
            if name not in known:
                fsync_file(self.folder / name)
            entries[name] = known.get(name) or {"size": size, "sha256": hash_file(self.folder / name)}
        meta = {k: v for k, v in self.manifest.items() if k not in ("format", "files")}
        meta[CHANGED] = sorted({*meta.get(CHANGED, ()), *altered})
        fsync_folder(self.folder)
        write_file(self.folder / MANIFEST, manifest_bytes(meta, entries))


def watch(folder: Path) -> FolderWatch:
    """A sealed folder as it is now, to be compared with what becomes of it."""
    return FolderWatch(folder, read_manifest(folder), _marks(folder))


def _marks(folder: Path) -> dict[str, Mark]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != MANIFEST:
            stat = path.stat()
            found[name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found
