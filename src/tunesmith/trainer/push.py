"""The Hub and the model card: what transformers writes, uploaded with huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub import ModelCard, metadata_load, metadata_save

from tunesmith.run.writing import write_file
from tunesmith.trainer.saving import TRAINER_STATE, bytes_written, write_result
from tunesmith.trainer.upstream import TrainingSummary, utils

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

_NOT_UPLOADED = ["_*", "checkpoint-*", ".lock", ".written", ".tmp-*"]


class HubUploads:
    """The repository of one Trainer on the Hub, its model card, and uploads that are under way."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._jobs: list[Any] = []

    def make_repo(self, token: str | None) -> str:
        """Makes sure the repository exists; returns its name."""
        args = self._trainer.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        token = args.hub_token if token is None else token
        made = _api().create_repo(name, token=token, private=args.hub_private_repo, exist_ok=True)
        return str(made.repo_id)

    def write_model_card(self, **facts: Any) -> None:
        """README.md from what the Trainer knows."""
        trainer = self._trainer
        summary = TrainingSummary.from_trainer(trainer, **facts)
        file = Path(trainer.args.output_dir) / "README.md"
        before = ModelCard.load(file).data.to_dict() if file.exists() else {}
        kept = {k: v for k, v in before.items() if k in ("library_name", "base_model") and v}

        def write(card: Path) -> None:
            write_file(card, summary.to_model_card().encode())
            if before.get("library_name") == "peft" and hasattr(trainer.model, "create_or_update_model_card"):
                trainer.model.create_or_update_model_card(str(card.parent))
            if kept:
                metadata_save(card, {**(metadata_load(card) or {}), **kept})

        write_result(file, bytes_written(write))

    def push(self, message: str, *, blocking: bool, token: str | None, revision: str | None, **card: Any) -> Any:
        """Uploads the output folder with a fresh model card; returns the commit, or a future when not blocking."""
        trainer, args = self._trainer, self._trainer.args
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
        return _api().upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=args.output_dir,
            commit_message=message,
            token=token,
            run_as_future=not blocking,
            ignore_patterns=_NOT_UPLOADED,
            revision=args.hub_revision if revision is None else revision,
        )

    def push_checkpoint(self, folder: str) -> None:
        """Uploads a checkpoint's model while training continues, as `hub_strategy` says."""
        strategy = self._trainer.args.hub_strategy
        if not self._trainer.is_world_process_zero() or strategy == utils.HubStrategy.END:
            return
        busy = any(not job.done() for job in self._jobs)
        if busy and not self._trainer.args.hub_always_push:
            return
        self._trainer.callback_handler.on_push_begin(self._trainer.args, self._trainer.state, self._trainer.control)
        message = f"Training in progress, step {self._trainer.state.global_step}"
        resumable = ["optimizer.safetensors", "generators.safetensors", "state.json", "MANIFEST.json", TRAINER_STATE]
        jobs = [self._upload(folder, message, None, resumable)]
        if strategy in (utils.HubStrategy.CHECKPOINT, utils.HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if strategy == utils.HubStrategy.CHECKPOINT else Path(folder).name
            jobs.append(self._upload(folder, f"{message}, checkpoint", place, None))
        self._jobs = [*(j for j in self._jobs if not j.done()), *jobs]

    def _upload(self, folder: str, message: str, place: str | None, ignored: list[str] | None) -> Any:
        return _api().upload_folder(
            repo_id=self._trainer.hub_model_id,
            folder_path=folder,
            path_in_repo=place,
            commit_message=message,
            token=self._trainer.args.hub_token,
            run_as_future=True,
            ignore_patterns=ignored,
            revision=self._trainer.args.hub_revision,
        )

    def finish(self) -> None:
        """Waits for uploads that are under way."""
        for job in self._jobs:
            job.result()
        self._jobs = []


def _api() -> Any:
    return huggingface_hub.HfApi()
