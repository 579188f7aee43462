"""What a Trainer uploads to the Hub with huggingface_hub: the output folder, and checkpoints while training continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from transformers.trainer_utils import HubStrategy

from tunesmith.trainer.checkpoints import TRAINER_STATE

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

_NOT_UPLOADED = ["_*", "checkpoint-*", ".lock", ".written", ".tmp-*"]


def init_hf_repo(trainer: Trainer, token: str | None = None) -> None:
    """Makes sure the repository exists."""
    if trainer.is_world_process_zero():
        args = trainer.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        token = args.hub_token if token is None else token
        made = _api().create_repo(name, token=token, private=args.hub_private_repo, exist_ok=True)
        trainer.hub_model_id = str(made.repo_id)


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
