"""Rows that were used before a checkpoint against the same rows now."""

from __future__ import annotations

from pathlib import Path

from tunesmith.events import Note
from tunesmith.train.generators import generators_untouched
from tunesmith.trainer.checkpoints import CheckpointPart
from tunesmith.trainer.identity import changed_run
from tunesmith.trainer.upstream import trainer_log
from tunesmith.trainer.used_rows import can_mark


class ComparisonPart(CheckpointPart):
    """The methods of a Trainer that notice other rows than before."""

    allow_changed_data: bool = False
    """True: a resume continues although data, model, tokenizer or arguments changed, and the journal records it."""

    def _compare_used_rows(self, folder: Path) -> list[str]:
        """Rows that were used before the checkpoint, read again: what changed, where that is allowed."""
        used, stored = self._windows.used, self._engine.extra["trainer"].get("used_rows") if self._engine else None
        if used is None or stored is None:
            return []
        used.restore(stored, with_stream=self.runtime.is_main and not self.args.ignore_data_skip)
        if not can_mark(self._windows.loader) or used.count is None:
            return []
        with generators_untouched():
            found = used.read_again(self._windows.loader.dataset)
        if found is not None and not self.allow_changed_data:
            raise changed_run(found, folder)
        if found is not None:
            used.varies = True
            trainer_log.warning("not an exact resume: resumes although %s", found)
        return [] if found is None else [f"resumes although {found}"]

    def _note_change(self, text: str, certain: bool) -> None:
        """Rows that come again after a resume are not what they were."""
        if certain and not self.allow_changed_data:
            raise changed_run(text, self._get_output_dir(self._trial))
        trainer_log.warning("not an exact resume: %s", text)
        if self._journal is not None:
            self._journal.append(Note(self.state.global_step, text))
