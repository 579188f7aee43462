"""Files of a Trainer beside its checkpoints: the model, metrics, state, model card. The folder may hold a person's files."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tunesmith.errors import ResourceError
from tunesmith.model.adapters import is_mixed
from tunesmith.run.ledger import has_ledger, is_ours, start_ledger, write_own
from tunesmith.run.sealed import remove_tree
from tunesmith.run.writing import kind_of, move_file, require_plain, require_same_folder, write_file
from tunesmith.train.snapshot import WEIGHTS
from tunesmith.train.weight_files import contiguous
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.resuming import TRAINER_STATE

log = logging.getLogger(__name__)

TRAINING_ARGS = "training_args.json"
_INDEX, CARD = "model.safetensors.index.json", "README.md"


class SavingPart(TrainerAttributes):
    """The methods of a Trainer that write single files and model folders."""

    _gathered: dict[str, Any] | None = None

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes `<split>_results.json`, and adds to `all_results.json`; the main process alone."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        write_result(folder / f"{split}_results.json", _json(metrics))
        if combined:
            target = place_of(folder / "all_results.json")
            known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
            write_result(target, _json({**known, **metrics}))

    def save_state(self) -> None:
        """Writes `trainer_state.json`; the main process alone."""
        if self.is_world_process_zero():
            data = bytes_written(lambda tmp: self.state.save_to_json(str(tmp)))
            write_result(Path(self.args.output_dir) / TRAINER_STATE, data)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state_dict = self._gathered if state_dict is None else state_dict

        def fill(tmp: Path) -> None:
            if hasattr(self.model, "save_pretrained") and not is_mixed(self.model):
                self.model.save_pretrained(tmp, state_dict=state_dict)
            else:
                weights = contiguous(self.model.state_dict() if state_dict is None else state_dict)
                save_file(weights, tmp / WEIGHTS, metadata={"format": "pt"})
            self._save_companions(tmp)

        publish_files(Path(self.args.output_dir if output_dir is None else output_dir), fill)

    def _save_companions(self, tmp: Path) -> None:
        """Tokenizer and arguments, beside the weights, in a folder that is being written."""
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(tmp)
        write_file(tmp / TRAINING_ARGS, self.args.to_json_string().encode())


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=4, sort_keys=True).encode()


def bytes_written(write: Callable[[Path], Any]) -> bytes:
    """What a library writes into a file, without a file that anyone sees."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "README.md")
        return (Path(folder) / "README.md").read_bytes()


def place_of(file: Path) -> Path:
    """Where a result goes: its name, or `<name>.tunesmith.<type>` beside a person's file of that name."""
    return file if is_ours(file) else file.with_name(f"{file.stem}.tunesmith{file.suffix}")


def write_result(file: Path, data: bytes) -> None:
    """Writes a result into an output folder; a person's file at that name stays, and a line says where the result is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    start_ledger(file.parent)
    place = place_of(file)
    if place != file:
        log.warning("%s was not written by tunesmith and is left alone; see %s", file, place.name)
    write_own(place, data)


def publish_files(target: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a model aside, then moves each file to its place in `target`. Other files there stay.

    A file that we did not write in the place of one of ours is a ResourceError, and nothing is changed.
    """
    require_same_folder(target)
    target.mkdir(parents=True, exist_ok=True)
    tmp = target / f".tmp-model-{os.getpid()}"
    tmp.mkdir()
    try:
        fill(tmp)
        card = (tmp / CARD).read_bytes() if (tmp / CARD).is_file() else None  # of PEFT; a person's own stays
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
            (write_result if has_ledger(target) or kind_of(place) is not None else write_file)(place, card)
        for stale in (target / WEIGHTS,) if _INDEX in names else (target / _INDEX,) if WEIGHTS in names else ():
            stale.unlink(missing_ok=True)  # `from_pretrained` would take it for the weights
    finally:
        remove_tree(tmp)
