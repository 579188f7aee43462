"""The Hub and the model card: what transformers writes, uploaded with huggingface_hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import ModelCard, metadata_load, metadata_save

from tunesmith.run.writing import write_file
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.resuming import TRAINER_STATE
from tunesmith.trainer.saving import bytes_written, write_result
from tunesmith.trainer.upstream import TrainingSummary, utils

log = logging.getLogger(__name__)

_NOT_UPLOADED = ["_*", "checkpoint-*", ".lock", ".written", ".tmp-*"]


class HubPart(TrainerAttributes):
    """The methods of a Trainer that write a model card and upload."""

    push_in_progress: list[Any]

    def init_hf_repo(self, token: str | None = None) -> None:
        """Makes sure the repository exists."""
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        token = self.args.hub_token if token is None else token
        made = _api().create_repo(name, token=token, private=self.args.hub_private_repo, exist_ok=True)
        self.hub_model_id = made.repo_id

    def create_model_card(
        self,
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
        if not self.is_world_process_zero():
            return
        summary = TrainingSummary.from_trainer(
            self,
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        file = Path(self.args.output_dir) / "README.md"
        before = ModelCard.load(file).data.to_dict() if file.exists() else {}
        kept = {k: v for k, v in before.items() if k in ("library_name", "base_model") and v}

        def write(card: Path) -> None:
            write_file(card, summary.to_model_card().encode())
            if before.get("library_name") == "peft" and hasattr(self.model, "create_or_update_model_card"):
                self.model.create_or_update_model_card(str(card.parent))
            if kept:
                metadata_save(card, {**(metadata_load(card) or {}), **kept})

        write_result(file, bytes_written(write))

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Uploads the output folder with a fresh model card; returns the commit, or a future when not blocking."""
        name = card.pop("model_name", None)
        if name is None and self.args.should_save:
            name = Path(self.args.hub_model_id or self.args.output_dir).name
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)  # type: ignore[attr-defined]
        if not self.is_world_process_zero():
            return None
        known = getattr(self.model, "model_tags", None)
        if known is not None:
            given = card.get("tags") or []
            card["tags"] = sorted({*([given] if isinstance(given, str) else given), *known})
        self.create_model_card(model_name=name, **card)
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        return _api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=self.args.output_dir,
            commit_message=commit_message,
            token=token,
            run_as_future=not blocking,
            ignore_patterns=_NOT_UPLOADED,
            revision=self.args.hub_revision if revision is None else revision,
        )

    def _push_from_checkpoint(self, folder: str) -> None:
        """Uploads a checkpoint's model while training goes on, as `hub_strategy` says."""
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == utils.HubStrategy.END:
            return
        busy = any(not job.done() for job in self.push_in_progress)
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        resumable = ["optimizer.safetensors", "generators.safetensors", "state.json", "MANIFEST.json", TRAINER_STATE]
        jobs = [self._upload(folder, message, None, resumable)]
        if strategy in (utils.HubStrategy.CHECKPOINT, utils.HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if strategy == utils.HubStrategy.CHECKPOINT else Path(folder).name
            jobs.append(self._upload(folder, f"{message}, checkpoint", place, None))
        self.push_in_progress = [*(j for j in self.push_in_progress if not j.done()), *jobs]

    def _upload(self, folder: str, message: str, place: str | None, ignored: list[str] | None) -> Any:
        return _api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            path_in_repo=place,
            commit_message=message,
            token=self.args.hub_token,
            run_as_future=True,
            ignore_patterns=ignored,
            revision=self.args.hub_revision,
        )

    def _finish_current_push(self) -> None:
        """Waits for uploads that are under way."""
        for job in self.push_in_progress:
            job.result()
        self.push_in_progress = []


def _api() -> Any:
    return huggingface_hub.HfApi()
