"""A cache of sha256 hashes and other answers about files: a file that did not change is not read again.

The same file: real path, device, inode, size, mtime and ctime in nanoseconds. No program can set ctime, so a file that was
written with its mtime put back is read again. The memory is in the user's own cache folder, never beside the file: a folder
from elsewhere cannot bring it along. A bit that the disk itself loses later is not seen before the file is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunesmith.runs.writing import create, hash_file

SMALL_BYTES = 1 << 20
"""Below, reading a file (0.7 ms at 1.4 GB/s) costs no more than looking it up."""
SETTLED_NS = 2_000_000_000
"""A file that was changed within this time may change again within the same tick of the file system's clock."""
MOST_ENTRIES = 1000
MOST_BYTES = 1 << 22
"""Of an entry; a larger one is ignored."""


def known_hash(file: Path) -> str:
    """What `hash_file` returns, from the cache if the same file was hashed before."""
    if _facts(file)[2] < SMALL_BYTES:
        return hash_file(file)
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]
    return str(_known(own_cache() / "hashes" / f"{name}.json", [file], lambda: hash_file(file)))


def _known(entry: Path, paths: Sequence[Path], ask: Callable[[], Any]) -> Any:
    before = [_facts(path) for path in paths]
    facts = before[0] if len(before) == 1 else [[str(path) for path in paths], *before]
    found = _recall(entry, facts)
    if found is None:
        found = ask()
        settled = max((max(times[3:]) for times in before), default=0) + SETTLED_NS < time.time_ns()
        if settled and [_facts(path) for path in paths] == before:
            with suppress(OSError):  # a cache that cannot be written costs time only
                _remember(entry, facts, found)
    return found


def signature(folder: Path, names: Iterable[str] | None = None) -> tuple[tuple[object, ...], ...]:
    """What shows whether files of a folder were changed or replaced, without reading them; all files by default."""
    chosen = sorted(p.name for p in folder.iterdir() if p.is_file()) if names is None else sorted(names)
    return tuple((name, *_facts(folder / name)) for name in chosen)


def _facts(file: Path) -> list[int]:
    info = file.stat()
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def own_cache() -> Path:
    """`$XDG_CACHE_HOME/tunesmith`, by default `~/.cache/tunesmith`: tables, tokens and hashes, which can be made again."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "tunesmith"


def _recall(entry: Path, facts: Sequence[object]) -> Any:
    """The value stored with these facts, or None. An entry that other users could have written is ignored."""
    try:
        for path in (entry.parent, entry):
            info = path.lstat()
            kind = stat.S_ISDIR(info.st_mode) if path == entry.parent else stat.S_ISREG(info.st_mode)
            if not kind or info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        with entry.open("rb") as file:
            noted = json.loads(file.read(MOST_BYTES))
        value = noted["sha256"]
        return value if noted["facts"] == facts and noted["self"] == _own_hash(facts, value) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remember(entry: Path, facts: Sequence[object], value: Any) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    old = sorted(entry.parent.glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    for path in old[: max(0, len(old) + 1 - MOST_ENTRIES)]:
        path.unlink(missing_ok=True)
    tmp = entry.with_suffix(f".{os.getpid()}.tmp")
    tmp.unlink(missing_ok=True)
    text = json.dumps({"facts": facts, "sha256": value, "self": _own_hash(facts, value)})
    with create(tmp, mode=0o600) as handle:
        handle.write(text.encode())
    os.replace(tmp, entry)


def _own_hash(facts: Sequence[object], value: Any) -> str:
    return hashlib.sha256(json.dumps([facts, value]).encode()).hexdigest()
