"""Folders that are either there and whole, or not there: written aside, hashed, fsynced, then renamed into place.

Order of durability: every file is on disk before MANIFEST.json, the manifest before the rename, the rename before the
parent folder's fsync. A folder whose manifest verifies is complete; anything else is debris that a sweep removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ResourceError, TunesmithError
from tunesmith.files import MAX_JSON_BYTES, read_plain
from tunesmith.run.fault_points import fault_point

MANIFEST = "MANIFEST.json"
FORMAT = 1
TMP_PREFIX = ".tmp-"

_LEFTOVER = re.compile(r"\.tmp-(?:(old|gone)-)?(checkpoint-\d+|best|model|\w+\.(?:json|yaml|md))-\d+|\.tmp-journal-\w+")
"""Exactly the names this package writes: an output_dir may hold other people's files."""


def write_sealed(target: Path, fill: Callable[[Path], Any], meta: dict[str, Any], *, bytes_needed: int = 0) -> None:
    """Publishes a folder that `fill` writes. On any failure `target` is as it was and nothing is left beside it.

    `fill` may give the sha256 of files it knows, or will know ({name: hex or a future of it}): those are not read again.
    """
    tmp = _aside(target)
    try:
        require_space(target.parent, bytes_needed)
        remove_tree(tmp)
        tmp.mkdir(parents=True)
        fault_point("save.begin")
        known = fill(tmp)
        fault_point("save.filled")
        _seal(tmp, meta, known if isinstance(known, dict) else {})
        fault_point("save.sealed")
        _publish(tmp, target)
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        number = None if isinstance(error, TunesmithError) else os_error_number(error)
        if number is None:
            raise
        raise disk_error(OSError(number, os.strerror(number)), target, bytes_needed) from error


def _publish(tmp: Path, target: Path) -> None:
    """Renames a sealed folder into place. Not durable means not published: a failed fsync takes it back."""
    old = _aside(target, "old-")
    replaces = target.exists()
    try:
        if replaces:
            remove_tree(old)
            os.rename(target, old)
            fault_point("save.moved")
        os.rename(tmp, target)
        fault_point("save.renamed")
        fsync_folder(target.parent)
    except BaseException:
        if not tmp.exists() and target.exists():
            os.rename(target, tmp)
        if replaces and not target.exists():
            os.rename(old, target)
        raise
    if replaces:
        remove_tree(old)


def _aside(target: Path, why: str = "") -> Path:
    """Where a folder waits before it is published, or after it was taken away. `sweep` knows these names."""
    return target.parent / f"{TMP_PREFIX}{why}{target.name}-{os.getpid()}"


def os_error_number(error: BaseException) -> int | None:
    """The errno behind an error. Rust libraries (safetensors, tokenizers) put it into their text: "(os error 28)"."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return None if found is None else int(found.group(1))


def require_space(folder: Path, bytes_needed: int) -> None:
    """A ResourceError when the disk has less free than asked for (with a tenth to spare)."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if bytes_needed and free < bytes_needed * 1.1:
        raise ResourceError(
            f"{bytes_needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free",
            where=str(folder),
            fix="Free some space, or put --output_dir on another disk; then give the same command again.",
        )


def disk_error(error: OSError, path: Path, bytes_needed: int = 0) -> ResourceError:
    """The one line for a failed write: which path, what happened, how much was needed and is free."""
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB free"
    except OSError:
        free = "free space unknown"
    needed = f", about {bytes_needed / 1e6:.1f} MB needed" if bytes_needed else ""
    kind = os.strerror(error.errno) if error.errno is not None else str(error)
    try:
        saved = any(path.parent.glob("checkpoint-*"))
    except OSError:
        saved = False
    fix = "Make room, mend the disk or choose another folder, then give the same command again."
    if saved:
        fix = "Earlier checkpoints are intact: make room or mend the disk, then give the same command again."
    return ResourceError(f"cannot be written: {kind} ({free}{needed})", where=str(path), fix=fix)


def verify(folder: Path, *, names: Container[str] | None = None) -> dict[str, Any]:
    """The manifest of an intact folder; a CheckpointError names the first file that is not as it was written.

    With `names` only these files are looked at.
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
            if hash_file(file) != entry["sha256"]:
                raise CheckpointError("its bytes are not those that were written (sha256 differs)", where=str(file))
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", where=str(file)) from error
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked against its own hash; the files it lists are not looked at."""
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
    return dict(manifest)


def is_leftover(name: str) -> bool:
    """Whether this is a name under which a folder or file waits before it is published, or after it was taken away."""
    return _LEFTOVER.fullmatch(name) is not None


def sweep(parent: Path) -> list[str]:
    """Removes what killed writers left behind; returns the names. Only for the holder of the run's lock.

    A folder that was moved aside for its successor comes back when that successor never arrived.
    """
    removed = []
    for path in sorted(parent.glob(f"{TMP_PREFIX}*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if match.group(1) == "old" and not (parent / match.group(2)).exists():
            os.rename(path, parent / match.group(2))
            fsync_folder(parent)
            continue
        remove_tree(path)
        removed.append(path.name)
    return removed


def retire(folder: Path) -> None:
    """Deletes a folder so that it is never seen half deleted under its own name."""
    aside = _aside(folder, "gone-")
    remove_tree(aside)
    fault_point("rotate.begin")
    os.rename(folder, aside)
    fault_point("rotate.renamed")
    fsync_folder(folder.parent)
    remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Removes a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_file(file: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fsync_file(file: Path) -> None:
    """Waits until a file's bytes are on disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Waits until a folder's entries are on disk."""
    fsync_file(folder)


def write_file_atomically(file: Path, data: bytes) -> None:
    """Replaces a small file: its readers see the old bytes or the new ones."""
    tmp = file.parent / f"{TMP_PREFIX}{file.name}-{os.getpid()}"
    try:
        with tmp.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(tmp, file)
        fsync_folder(file.parent)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise disk_error(error, file, len(data)) from error


def _seal(folder: Path, meta: dict[str, Any], known: dict[str, str | Future[str]]) -> None:
    """Hashes and fsyncs every file, then writes the manifest last.

    Threads hash while this one waits for the disk: all that changes the folder happens in one thread, in one order.
    """
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        hashes = {n: known[n] if n in known else pool.submit(hash_file, file) for n, file in files.items()}
        for file in files.values():
            fsync_file(file)
        entries = {
            name: {"size": files[name].stat().st_size, "sha256": value if isinstance(value, str) else value.result()}
            for name, value in hashes.items()
        }
    file = folder / MANIFEST
    with file.open("wb") as handle:
        handle.write(manifest_bytes(meta, entries))
        handle.flush()
        os.fsync(handle.fileno())
    for sub in sorted(p for p in folder.rglob("*") if p.is_dir()):
        fsync_folder(sub)
    fsync_folder(folder)


def manifest_bytes(meta: dict[str, Any], entries: dict[str, Any]) -> bytes:
    """A manifest with its own hash, as it is written."""
    manifest = {"format": FORMAT, **meta, "files": entries}
    manifest["self"] = _own_hash(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def _own_hash(manifest: dict[str, Any]) -> str:
    body = {k: v for k, v in manifest.items() if k != "self"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
