"""Folders that are either complete or absent: written to a temporary folder, hashed, fsynced, then renamed.

Order of durability: every file is on disk before MANIFEST.json, the manifest before the rename, the rename before the
parent folder's fsync. A folder whose manifest verifies is complete; anything else is debris that a sweep removes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ResourceError, TunesmithError
from tunesmith.files import (
    MAX_JSON_BYTES,
    TMP_PREFIX,
    disk_error,
    fault_point,
    fsync_path,
    hash_file,
    in_the_way,
    kind_of,
    read_plain,
    write_new,
)

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
FORMAT = 1
RESULTS = "results"
"""The entry in the manifest of model/ with the sha256 of the result files of its run."""
_ONLY_OURS = ("generators.safetensors", "tunesmith.json")
"""File names that identify our folder if its manifest is missing."""

_LEFTOVER = re.compile(
    r"\.tmp-(?:(old|gone)-)?(checkpoint-\d+|best|model|\w+\.(?:jsonl?|yaml|md|html|png|svg|parquet)|\.lock)-\d+"
    r"|\.tmp-journal-\w+"
)
"""Exactly the names that this package writes, because an output_dir may contain other files."""


def publish_folder(target: Path, fill: Callable[[Path], Any], meta: dict[str, Any], *, bytes_needed: int = 0) -> None:
    """Publish a folder that `fill` writes. After a failure, `target` is unchanged and nothing is left behind.

    `fill` may return known SHA-256 hashes ({name: hex or a future of it}); those files are not read again.
    """
    tmp = _aside(target)
    require_own_target(target)
    try:
        require_space(target.parent, bytes_needed)
        remove_tree(tmp)
        tmp.mkdir()
        fault_point("save.begin")
        known = fill(tmp)
        fault_point("save.filled")
        write_manifest(tmp, meta, known if isinstance(known, dict) else {})
        fault_point("save.sealed")
        _publish(tmp, target)
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        number = None if isinstance(error, TunesmithError) else os_error_number(error)
        if number is None:
            raise
        raise disk_error(OSError(number, os.strerror(number)), target, bytes_needed) from error


def _publish(tmp: Path, target: Path) -> None:
    """Rename a complete folder into place. If the fsync fails, the rename is undone."""
    old = _aside(target, "old-")
    replaces = target.exists()
    try:
        if replaces:
            remove_tree(old)
            os.rename(target, old)
            fault_point("save.moved")
        os.rename(tmp, target)
        fault_point("save.renamed")
        fsync_path(target.parent)
    except BaseException:
        if not tmp.exists() and target.exists():
            os.rename(target, tmp)
        if replaces and not target.exists():
            os.rename(old, target)
        raise
    if replaces:
        _carry_over(old, target)
        remove_tree(old)


def has_manifest(folder: Path) -> bool:
    """Return whether we wrote this folder, intact or damaged: it has our manifest, or one that is no longer JSON."""
    if kind_of(folder) != "a folder":
        return False
    if kind_of(folder / MANIFEST) is None:
        return any(kind_of(folder / name) == "a file" for name in _ONLY_OURS)
    try:
        manifest = json.loads(read_plain(folder / MANIFEST, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return kind_of(folder / MANIFEST) == "a file"
    return isinstance(manifest, dict) and {"self", "files"} <= manifest.keys()


def require_own_target(target: Path) -> None:
    """Raise a ResourceError if something that we didn't write is in place of the folder."""
    if kind_of(target) is not None and not has_manifest(target):
        raise in_the_way(target, "was not written by tunesmith, so it is not replaced")


def strays(folder: Path) -> list[str]:
    """Return files that a person added to a folder; unknown if the manifest is damaged."""
    try:
        known = {MANIFEST, *read_manifest(folder)["files"]}
    except CheckpointError:
        return []
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(name) for name in found if str(name) not in known)


def _carry_over(old: Path, target: Path) -> None:
    """Move files that a person added to a folder into its replacement."""
    for name in strays(old):
        if kind_of(target / name) is None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(old / name, target / name)


def _aside(target: Path, why: str = "") -> Path:
    """Return the temporary name of a folder before publication or after removal; `sweep` finds these."""
    return target.parent / f"{TMP_PREFIX}{why}{target.name}-{os.getpid()}"


def os_error_number(error: BaseException) -> int | None:
    """Return the errno behind an error. Rust libraries (safetensors, tokenizers) put it into their text: "(os error 28)"."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return None if found is None else int(found.group(1))


def require_space(folder: Path, bytes_needed: int) -> None:
    """Raise a ResourceError if the disk has less than 1.1 times these bytes free."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if bytes_needed and free < bytes_needed * 1.1:
        raise ResourceError(
            f"{bytes_needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free",
            where=str(folder),
            fix="Free some space, or put --output_dir on another disk; then run the same command again.",
        )


def verify(
    folder: Path, *, names: Container[str] | None = None, hashed: Callable[[Path], str] = hash_file
) -> dict[str, Any]:
    """Return the manifest of an intact folder; a CheckpointError names the first modified file.

    `names` limits the check to these files. `hashed` returns the SHA-256 of a file.
    """
    manifest = read_manifest(folder)
    wanted = {name: entry for name, entry in manifest["files"].items() if names is None or name in names}
    for name, entry in sorted(wanted.items()):
        file = folder / name
        try:
            if not file.is_file():
                raise CheckpointError("is missing" if not file.exists() else "is not a file", where=str(file))
            size = file.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(f"has {size} bytes instead of {entry['size']}", where=str(file))
            if hashed(file) != entry["sha256"]:
                raise CheckpointError("its bytes are not those that were written (sha256 differs)", where=str(file))
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", where=str(file)) from error
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, checked against its own hash; the listed files are not read."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(read_plain(file, MAX_JSON_BYTES, follow=True))
        stored = manifest.pop("self")
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(file)) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError("is damaged", where=str(file)) from error
    if stored != _own_hash(manifest):
        raise CheckpointError("is damaged (its own hash differs)", where=str(file))
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"has format {manifest.get('format')}, this version reads {FORMAT}", where=str(file))
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError("lists no files", where=str(file))
    for name, entry in manifest["files"].items():
        known = isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        if not known or os.path.isabs(name) or not {"..", "\0"}.isdisjoint((*Path(name).parts, *name)):
            raise CheckpointError(f"lists {name[:60]!r}, which we do not write", where=str(file))
    return dict(manifest)


def is_leftover(name: str) -> bool:
    """Return whether this is a temporary name of a folder or file before publication or after removal."""
    return _LEFTOVER.fullmatch(name) is not None


def sweep(parent: Path) -> list[str]:
    """Remove leftovers of killed writers; return their names. Requires the lock of the run.

    A folder that was moved aside is restored if its replacement is missing.
    """
    removed = []
    for path in sorted(parent.glob(f"{TMP_PREFIX}*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or kind_of(path) not in ("a file", "a folder"):
            continue
        if match.group(1) == "old":
            home = parent / match.group(2)
            if kind_of(home) is None:
                os.rename(path, home)
                fsync_path(parent)
                continue
            if kind_of(home) == "a folder":
                _carry_over(path, home)
        remove_tree(path)
        removed.append(path.name)
    return removed


def retire(folder: Path) -> None:
    """Rename a folder and delete it, so that it is never partially deleted under its own name."""
    extra = strays(folder) if has_manifest(folder) else ["it"]
    if extra:
        log.warning("%s is kept: %s was not written by tunesmith", folder, ", ".join(extra[:3]))
        return
    aside = _aside(folder, "gone-")
    remove_tree(aside)
    fault_point("rotate.begin")
    os.rename(folder, aside)
    fault_point("rotate.renamed")
    fsync_path(folder.parent)
    remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_manifest(folder: Path, meta: dict[str, Any], known: dict[str, str | Future[str]]) -> None:
    """Hash and fsync every file, then write the manifest.

    Threads hash while this one waits for the disk; only this thread changes the folder, in a fixed order.
    """
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        hashes = {n: known[n] if n in known else pool.submit(hash_file, file) for n, file in files.items()}
        for file in files.values():
            fsync_path(file)
        entries = {
            name: {"size": files[name].stat().st_size, "sha256": value if isinstance(value, str) else value.result()}
            for name, value in hashes.items()
        }
    write_new(folder / MANIFEST, manifest_bytes(meta, entries))
    fsync_path(folder / MANIFEST)
    for sub in sorted(p for p in folder.rglob("*") if p.is_dir()):
        fsync_path(sub)
    fsync_path(folder)


def manifest_bytes(meta: dict[str, Any], entries: dict[str, Any]) -> bytes:
    """Return a manifest with its own hash."""
    manifest = {"format": FORMAT, **meta, "files": entries}
    manifest["self"] = _own_hash(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def _own_hash(manifest: dict[str, Any]) -> str:
    body = {k: v for k, v in manifest.items() if k != "self"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
