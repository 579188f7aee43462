"""Files of a Trainer beside its checkpoints: the model, metrics, state, model card; and their upload with huggingface_hub.

The folder may hold files of the user, which are never replaced.
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

import huggingface_hub
from huggingface_hub import ModelCard, metadata_load, metadata_save
from safetensors.torch import save_file
from transformers.modelcard import TrainingSummary
from transformers.trainer_utils import HubStrategy

from tunesmith.encoder.params import is_mixed
from tunesmith.errors import ResourceError
from tunesmith.keep.weight_files import WEIGHTS, contiguous
from tunesmith.ranks.sharding import gathered_state, is_sharded
from tunesmith.run.ownership import has_ledger, is_ours, start_ledger, write_own
from tunesmith.run.sealed import remove_tree
from tunesmith.run.writing import kind_of, move_file, require_plain, require_same_folder, write_file

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)

TRAINING_ARGS, TRAINER_STATE = "training_args.json", "trainer_state.json"
_INDEX, CARD = "model.safetensors.index.json", "README.md"


def save_model(trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Writes the model so that `from_pretrained` loads it; the main process alone. With fsdp all processes call it."""
    with gathering(trainer):
        if trainer.args.should_save:
            trainer._save(trainer.args.output_dir if output_dir is None else output_dir)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


@contextlib.contextmanager
def gathering(trainer: Trainer) -> Iterator[None]:
    """Inside, `weights_to_save` are the whole model on the main process, also where each process holds a part of it."""
    if not is_sharded(trainer.model) or trainer._gathered is not None:
        yield
        return
    trainer._gathered = gathered_state(trainer.model, keep=trainer.runtime.is_main)
    try:
        yield
    finally:
        trainer._gathered = None


def weights_to_save(trainer: Trainer) -> dict[str, Any]:
    """The weights as a save writes them."""
    found: dict[str, Any] = trainer.model.state_dict() if trainer._gathered is None else trainer._gathered
    return found


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


def save_companions(trainer: Trainer, tmp: Path) -> None:
    """Tokenizer and arguments, beside the weights, in a folder that is being written."""
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(tmp)
    write_file(tmp / TRAINING_ARGS, trainer.args.to_json_string().encode())


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
    return file if is_ours(file) else file.with_name(f"{file.stem}.tunesmith{file.suffix}")


def write_result(file: Path, data: bytes) -> None:
    """Writes a result into an output folder; a file of the user at that name stays, and a line names the place of the result."""
    file.parent.mkdir(parents=True, exist_ok=True)
    start_ledger(file.parent)
    place = place_of(file)
    if place != file:
        log.warning("%s was not written by tunesmith and is left alone; see %s", file, place.name)
    write_own(place, data)


def publish_files(target: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes a model aside, then each file is moved to its place in `target`. Other files there stay.

    A file that we did not write in the place of one of ours is a ResourceError, and nothing is changed.
    """
    require_same_folder(target)
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
            (write_result if has_ledger(target) or kind_of(place) is not None else write_file)(place, card)
        for stale in (target / WEIGHTS,) if _INDEX in names else (target / _INDEX,) if WEIGHTS in names else ():
            stale.unlink(missing_ok=True)  # `from_pretrained` would take it for the weights
    finally:
        remove_tree(tmp)


_NOT_UPLOADED = ["_*", "checkpoint-*", ".lock", ".written", ".tmp-*"]


def init_hf_repo(trainer: Trainer, token: str | None = None) -> None:
    """Makes sure the repository exists."""
    if trainer.is_world_process_zero():
        args = trainer.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        token = args.hub_token if token is None else token
        made = _api().create_repo(name, token=token, private=args.hub_private_repo, exist_ok=True)
        trainer.hub_model_id = str(made.repo_id)


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


def push_to_hub(
    trainer: Trainer,
    commit_message: str = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    **card: Any,
) -> Any:
    """Uploads the output folder with a fresh model card; returns the commit, or a future when not blocking."""
    args = trainer.args
    name = card.pop("model_name", None)
    if name is None and args.should_save:
        name = Path(args.hub_model_id or args.output_dir).name
    token = args.hub_token if token is None else token
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    known = getattr(trainer.model, "model_tags", None)
    if known is not None:
        given = card.get("tags") or []
        card["tags"] = sorted({*([given] if isinstance(given, str) else given), *known})
    trainer.create_model_card(model_name=name, **card)
    trainer._finish_current_push()
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    options = {"token": token, "run_as_future": not blocking, "ignore_patterns": _NOT_UPLOADED}
    revision = args.hub_revision if revision is None else revision
    return _upload(trainer, args.output_dir, commit_message, revision=revision, **options)


def push_checkpoint(trainer: Trainer, checkpoint_folder: str) -> None:
    """Uploads a checkpoint's model while training continues, as `hub_strategy` says."""
    args, strategy = trainer.args, trainer.args.hub_strategy
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return
    if any(not job.done() for job in trainer._uploads) and not args.hub_always_push:
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = f"Training in progress, step {trainer.state.global_step}"
    options = {"token": args.hub_token, "run_as_future": True, "revision": args.hub_revision}
    resumable = ["optimizer.safetensors", "generators.safetensors", "state.json", "MANIFEST.json", TRAINER_STATE]
    jobs = [_upload(trainer, checkpoint_folder, message, path_in_repo=None, ignore_patterns=resumable, **options)]
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name
        jobs.append(_upload(trainer, checkpoint_folder, f"{message}, checkpoint", path_in_repo=place, **options))
    trainer._uploads = [*(job for job in trainer._uploads if not job.done()), *jobs]


def _upload(trainer: Trainer, folder: str, message: str, **options: Any) -> Any:
    return _api().upload_folder(repo_id=trainer.hub_model_id, folder_path=folder, commit_message=message, **options)


def finish_uploads(trainer: Trainer) -> None:
    """Waits for uploads that are under way."""
    for job in trainer._uploads:
        job.result()
    trainer._uploads = []


def _api() -> Any:
    return huggingface_hub.HfApi()
