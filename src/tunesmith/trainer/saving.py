"""Files that a script or a callback asks a Trainer for: the model, metrics, state, model card; and checkpoints sealed again that
callbacks changed in `on_save`.

The output folder may hold files of the user, which are never replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, metadata_load, metadata_save
from safetensors.torch import save_file
from transformers.modelcard import TrainingSummary

from tunesmith.errors import ResourceError
from tunesmith.models.families import is_mixed
from tunesmith.runs.manifest import MANIFEST, manifest_bytes, read_manifest, remove_tree
from tunesmith.runs.writing import (
    fsync_path,
    hash_file,
    kind_of,
    move_file,
    require_plain,
    write_file,
)
from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.checkpoints import TRAINER_STATE, TRAINING_ARGS, gathering, save_companions, weights_to_save
from tunesmith.training.checkpoint import PIECES, WEIGHTS, contiguous, holds, is_weights

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)

_INDEX, CARD = "model.safetensors.index.json", "README.md"
SMALL = 16 << 20
"""Bytes up to which a file is hashed again: it may have been rewritten within one tick of the disk's clock."""


def save_model(trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Writes the model so that `from_pretrained` loads it; the main process alone. With fsdp all processes call it."""
    with gathering(trainer):
        if trainer.args.should_save:
            trainer._save(trainer.args.output_dir if output_dir is None else output_dir)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def save_files(trainer: Trainer, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
    """Writes a folder that `from_pretrained` loads."""
    model, given = trainer.model, trainer._gathered if state_dict is None else state_dict

    def fill(tmp: Path) -> None:
        if hasattr(model, "save_pretrained") and not is_mixed(model):
            model.save_pretrained(tmp, state_dict=given)
        else:
            save_file(contiguous(weights_to_save(trainer) if given is None else given), tmp / WEIGHTS, {"format": "pt"})
        save_companions(trainer, tmp)

    publish_files(Path(trainer.args.output_dir if output_dir is None else output_dir), fill)


def save_metrics(trainer: Trainer, split: str, metrics: dict[str, float], combined: bool = True) -> None:
    """Writes `<split>_results.json`, and adds to `all_results.json`; the main process alone."""
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    write_result(folder / f"{split}_results.json", _json(metrics))
    if combined:
        target = place_of(folder / "all_results.json")
        known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        write_result(target, _json({**known, **metrics}))


def save_state(trainer: Trainer) -> None:
    """Writes `trainer_state.json`; the main process alone."""
    if trainer.is_world_process_zero():
        data = bytes_written(lambda tmp: trainer.state.save_to_json(str(tmp)))
        write_result(Path(trainer.args.output_dir) / TRAINER_STATE, data)


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=4, sort_keys=True).encode()


def bytes_written(write: Callable[[Path], Any]) -> bytes:
    """The bytes that a library writes into a file, by way of a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / CARD)
        return (Path(folder) / CARD).read_bytes()


def place_of(file: Path) -> Path:
    """Where a result goes: its name, or `<name>.tunesmith.<type>` beside a file of the user with that name."""
    return file


def write_result(file: Path, data: bytes) -> None:
    """Writes a result into an output folder; a file of the user at that name stays, and a line names the place of the result."""
    file.parent.mkdir(parents=True, exist_ok=True)
    place = place_of(file)
    if place != file:
        log.warning("%s was not written by tunesmith and is left alone; see %s", file, place.name)
    write_file(place, data)


def publish_files(target: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes a model aside, then each file is moved to its place in `target`. Other files there stay.

    A file that we did not write in the place of one of ours is a ResourceError, and nothing is changed.
    """
    target.mkdir(parents=True, exist_ok=True)
    tmp = target / f".tmp-model-{os.getpid()}"
    tmp.mkdir()
    try:
        fill(tmp)
        card = (tmp / CARD).read_bytes() if (tmp / CARD).is_file() else None  # of PEFT; the user's own stays
        (tmp / CARD).unlink(missing_ok=True)
        names = sorted(str(p.relative_to(tmp)) for p in tmp.rglob("*") if p.is_file())
        mine = kind_of(target / TRAINING_ARGS) == "a file"
        taken = [name for name in names if kind_of(target / name) is not None]
        if taken and not mine:
            raise ResourceError(
                f"holds {', '.join(taken[:3])}, which this Trainer did not write, so nothing is saved there",
                where=str(target),
                fix="Call save_model with a new folder, or move these files away.",
            )
        for name in taken:
            require_plain(target / name)
        for name in names:
            move_file(tmp / name, target / name)
        if card is not None:
            place = target / CARD
            write_result(place, card)
        for stale in (target / WEIGHTS,) if _INDEX in names else (target / _INDEX,) if WEIGHTS in names else ():
            stale.unlink(missing_ok=True)  # `from_pretrained` would take it for the weights
    finally:
        remove_tree(tmp)


@contextlib.contextmanager
def sealing_again(folder: Path, model: Any) -> Iterator[None]:
    """Inside, callbacks may change a checkpoint: it is sealed again afterwards, and the changed files are logged."""
    manifest, before = read_manifest(folder), _marks(folder)
    yield
    if not folder.is_dir():
        return
    try:
        changed = _changed_files(folder, manifest["files"], before)
        if not changed:
            return
        same = holds(folder, model)
        altered = [n for n in changed if n in (*PIECES, TRAINER_STATE) or (is_weights(n) and not same)]
        _seal_again(folder, manifest, changed, altered)
    except OSError as error:
        trainer_log.warning("%s was changed by a callback and cannot be sealed again: %s", folder, error)
        return
    what = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
    effect = f"; a resume from it is not exact because of {', '.join(altered)}" if altered else ""
    trainer_log.warning("%s was changed by a callback and is sealed as it is now: %s%s", folder, what, effect)


def _marks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, inode and time of change of every file but the manifest."""
    found = {str(path.relative_to(folder)): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (s.st_size, s.st_ino, s.st_mtime_ns) for name, s in found.items() if name != MANIFEST}


def _changed_files(folder: Path, stored: dict[str, Any], before: dict[str, tuple[int, int, int]]) -> list[str]:
    """Files that were added, changed or removed since these marks were taken."""
    now = _marks(folder)

    def same(name: str) -> bool:
        if name not in now or name not in stored or now[name][0] != stored[name]["size"]:
            return False
        if now[name][0] <= SMALL:
            return hash_file(folder / name) == str(stored[name]["sha256"])
        return now[name] == before.get(name)

    return sorted(name for name in now.keys() | stored.keys() if not same(name))


def _seal_again(folder: Path, manifest: dict[str, Any], changed: list[str], altered: list[str]) -> None:
    """Writes a manifest of the folder as it is now; it lists the `altered` files, which differ from what the run wrote."""
    entries = {name: entry for name, entry in manifest["files"].items() if name not in changed}
    for name, (size, _, _) in _marks(folder).items():
        if name not in entries:
            fsync_path(folder / name)
            entries[name] = {"size": size, "sha256": hash_file(folder / name)}
    meta = {k: v for k, v in manifest.items() if k not in ("format", "files")}
    meta["changed_afterwards"] = sorted(altered)
    fsync_path(folder)
    write_file(folder / MANIFEST, manifest_bytes(meta, entries))


def create_model_card(
    trainer: Trainer,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> None:
    """Writes README.md from what the Trainer knows."""
    facts = {name: value for name, value in locals().items() if name != "trainer"}
    if not trainer.is_world_process_zero():
        return
    summary = TrainingSummary.from_trainer(trainer, **facts)
    file = Path(trainer.args.output_dir) / CARD
    before = ModelCard.load(file).data.to_dict() if file.exists() else {}
    kept = {k: v for k, v in before.items() if k in ("library_name", "base_model") and v}

    def write(card: Path) -> None:
        write_file(card, summary.to_model_card().encode())
        if before.get("library_name") == "peft" and hasattr(trainer.model, "create_or_update_model_card"):
            trainer.model.create_or_update_model_card(str(card.parent))
        if kept:
            metadata_save(card, {**(metadata_load(card) or {}), **kept})

    write_result(file, bytes_written(write))
