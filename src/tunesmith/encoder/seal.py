"""A model folder against its manifest, once for each load: what decides about predictions is as it was written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tunesmith.errors import CheckpointError
from tunesmith.run.layout import RunDir
from tunesmith.run.remembered import known_hash, signature
from tunesmith.run.sealed import MANIFEST, read_manifest, verify

IDLE = (
    "*.md",
    "LICENSE*",
    "generation_config.json",
    "chat_template*",
    "train*_results.json",
    "training_args.json",
    "trainer_state.json",
    "state.json",
    "optimizer.safetensors",
    "generators.safetensors",
    "vocabulary.safetensors",
)
"""Files of a model folder or checkpoint that no prediction depends on: they may change."""
ACTIVE = (
    "config.json",
    "tunesmith.json",
    "adapter_config.json",
    "adapter_model*",
    "model*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "*.model",
)
"""Files that are read when they are there: one that was added later decides as much as one that was changed."""
_FIX = (
    "Restore the folder from a copy. If the change is yours, copy the folder to another place without "
    f"{MANIFEST} and name that one."
)


@dataclass(frozen=True)
class Seal:
    """What a folder's files were when they were verified. `sealed` is False for a folder of another program."""

    folder: Path
    sealed: bool
    seen: tuple[tuple[object, ...], ...]

    def require_unchanged(self) -> None:
        """A CheckpointError when a file was changed or replaced since: some of them may have been read after that."""
        if signature(self.folder) != self.seen:
            raise CheckpointError("was changed while it was loaded", where=str(self.folder), fix="Load it again.")


def check_seal(folder: Path) -> Seal:
    """A CheckpointError names the first file that is not as it was written."""
    seen = signature(folder)
    if not (folder / MANIFEST).is_file():
        if _is_part_of_run(folder):
            raise CheckpointError(f"has no {MANIFEST}, so it cannot be verified", where=str(folder), fix=_FIX)
        return Seal(folder, False, seen)
    try:
        listed = read_manifest(folder)["files"]
        verify(folder, names={name for name in listed if not _matches(name, IDLE)}, hashed=known_hash)
    except CheckpointError as error:
        raise CheckpointError(error.problem, where=error.where, fix=_FIX) from None
    for file in sorted(folder.iterdir()):
        if file.name not in listed and _matches(file.name, ACTIVE) and not _matches(file.name, IDLE):
            raise CheckpointError(f"was added after {MANIFEST} was written", where=str(file), fix=_FIX)
    return Seal(folder, True, seen)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_part_of_run(folder: Path) -> bool:
    home = folder.resolve()
    known = home.name in ("model", "best") or re.fullmatch(r"checkpoint-\d+", home.name) is not None
    return known and RunDir(home.parent).journal_file.exists()
