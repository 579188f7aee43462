"""Checkpoints of a Trainer: our sealed folders under transformers' names, with `trainer_state.json` inside; no pickle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError
from tunesmith.model.adapters import has_adapters
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import retire, verify, write_sealed
from tunesmith.train.checkpoint import Identity, save_checkpoint
from tunesmith.train.plain import to_plain
from tunesmith.train.sharding import is_sharded, whole_state
from tunesmith.train.shards import verify_checkpoint
from tunesmith.train.snapshot import write_files
from tunesmith.train.weight_files import load_weights, weight_files, weight_names
from tunesmith.trainer.resuming import TRAINER_STATE, belongs_to
from tunesmith.trainer.saving import SavingPart
from tunesmith.trainer.upstream import ExportableState, PreTrainedModel, parts, trainer_log

log = trainer_log


class CheckpointPart(SavingPart):
    """The methods of a Trainer that write to disk and read it back."""

    _identity: Identity

    log_metrics = parts.log_metrics
    metrics_format = staticmethod(parts.metrics_format)
    get_num_trainable_parameters = parts.get_num_trainable_parameters
    get_learning_rates = parts.get_learning_rates
    get_optimizer_group = parts.get_optimizer_group

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model so that `from_pretrained` loads it; the main process alone. With fsdp all processes call it."""
        with self._gathering():
            if self.args.should_save:
                self._save(self.args.output_dir if output_dir is None else output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _gathering(self) -> Iterator[None]:
        """Inside, `_weights` is the whole model on the main process, also where each process holds a part of it."""
        if not is_sharded(self.model) or self._gathered is not None:
            yield
            return
        self._gathered = whole_state(self.model, keep=self.runtime.is_main)
        try:
            yield
        finally:
            self._gathered = None

    def _get_output_dir(self, trial: Any = None) -> str:
        """The run folder: the output folder, or one inside it for each trial of a search."""
        if self.hp_search_backend is None or trial is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{trial.number}"
        return str(Path(self.args.output_dir) / name)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Publishes `checkpoint-<step>`, then removes older ones beyond `save_total_limit`."""
        assert self._engine is not None
        run = RunDir(self._get_output_dir(trial))
        folder = run.checkpoint(self.state.global_step)
        if self._journal is not None:
            self._journal.settle()
        best = run.checkpoint(self.state.best_global_step) if self.state.best_global_step else None
        if best is not None and (best == folder or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        self._export_callbacks()
        self._engine.extra["trainer"] = self._resume_notes()
        whole = self._saves_by_itself() or self.args.save_only_model
        with self._gathering() if whole else contextlib.nullcontext():
            if self.args.save_only_model:
                self._save_weights_only(folder)
            else:
                save_checkpoint(folder, self._engine, self._identity, describe=self._describe)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))  # type: ignore[attr-defined]
        if self.args.should_save:
            self._rotate(run)
        self.runtime.barrier()

    def _save_weights_only(self, folder: Path) -> None:
        if self.runtime.is_main:
            files = weight_files(self.model, self.model.state_dict() if self._gathered is None else self._gathered)

            def fill(tmp: Path) -> Any:
                self._describe(tmp)
                return write_files(tmp, files)

            write_sealed(folder, fill, {"kind": "weights", "step": self.state.global_step, **self._identity.to_json()})

    def _saves_by_itself(self) -> bool:
        """Whether files of a checkpoint come from `save_model`, which a subclass overrides, or from PEFT."""
        return self.overrides("save_model") or self.overrides("_save") or has_adapters(self.model)

    def _describe(self, tmp: Path) -> None:
        """What makes a checkpoint loadable elsewhere, and what scripts look for in it. The engine's weights come after it."""
        if self._saves_by_itself():
            self.save_model(str(tmp), _internal_call=True)
        if isinstance(self.model, PreTrainedModel) and not has_adapters(self.model):
            self.model.config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
            self.model.config.dtype = self.model.dtype
            self.model.config.save_pretrained(tmp)
        self._save_companions(tmp)
        self.state.save_to_json(str(tmp / TRAINER_STATE))

    def _rotate(self, run: RunDir, *, at_end: bool = False) -> None:
        """Deletes what `save_total_limit` does not allow: oldest first, never the best one, never the newest while training."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        mine = [f for f in run.checkpoints() if belongs_to(f, self._run_id)]
        best = None if self.state.best_model_checkpoint is None else Path(self.state.best_model_checkpoint).resolve()
        kept = {f for f in mine[-1:] if not at_end} | {f for f in mine if f.resolve() == best}
        if at_end and (limit != 1 or best is None):
            return
        limit = max(limit, len(kept))
        for folder in [f for f in mine if f not in kept][: max(len(mine) - limit, 0)]:
            retire(folder)

    def _export_callbacks(self) -> None:
        """Puts the state of every stateful callback into `state.stateful_callbacks`."""
        found: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if name in found:
                    found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), callback.state()]
                else:
                    found[name] = callback.state()
        self.state.stateful_callbacks = found

    def _load_callback_state(self) -> None:
        """Restores counters of stateful callbacks; with restore_callback_states_from_checkpoint, their arguments too."""
        whole = self.args.restore_callback_states_from_checkpoint
        for name, stored in self.state.stateful_callbacks.items():
            mine = [c for c in [*self.callback_handler.callbacks, self.control] if type(c).__name__ == name]
            if not mine:
                log.warning(f"The checkpoint holds the state of a callback that this run does not have: {name}")
            for callback, data in zip(mine, stored if isinstance(stored, list) else [stored], strict=False):
                if callback is self.control and not whole:
                    continue
                values = {**(data.get("args", {}) if whole else {}), **data.get("attributes", {})}
                for key, value in values.items():
                    setattr(callback, key, value)

    def _resume_notes(self) -> dict[str, Any]:
        """What a resume needs beside the engine's state."""
        progress = self._progress
        return {
            "scheduler": to_plain(self.lr_scheduler.state_dict(), "scheduler"),
            "ended_epochs": list(progress.ended_epochs),
            "epoch": progress.epoch,
            "epoch_open": progress.epoch_open,
            "steps_in_epoch": progress.steps_in_epoch,
            "loss_since_log": progress.loss_since_log,
            "logged_step": progress.logged_step,
            "used_rows": None if self._windows.used is None else self._windows.used.to_json(),
        }

    def _load_best_model(self) -> None:
        """Puts the weights of the best checkpoint into the model. Other files of it may have changed since: a warning."""
        folder = Path(self.state.best_model_checkpoint)
        if not folder.is_dir():
            log.warning("Could not locate the best model at %s: the weights stay those of the last step", folder)
            return
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            verify(folder, names=weight_names(folder))
            log.warning("its weights are intact and used as the best, but: %s", error.line())
        load_weights(self.model, folder)
