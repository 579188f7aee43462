"""The journal of a Trainer's run: every step and evaluation, for curves and diagnosis."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from tunesmith.events import Evaluated, Note, Resumed, RunStarted, Saved
from tunesmith.run.journal import LOST_JOURNAL, Journal, require_journal, truncate_journal
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.ledger import start_ledger
from tunesmith.run.reader import read_journal
from tunesmith.run.sealed import require_sealed, sweep
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.upstream import has_length

log = logging.getLogger(__name__)


def require_room(run: RunDir, num_steps: int, *, saves: bool) -> None:
    """A ResourceError when a person's journal, or a checkpoint that we did not write, stands where this run would write."""
    require_journal(run.journal_file)
    for folder in run.checkpoints():
        if saves and checkpoint_step(folder) <= num_steps:
            require_sealed(folder)


class JournalPart(TrainerAttributes):
    """The methods of a Trainer that open the journal and write what callbacks decided."""

    def _open_journal(self, run: RunDir, folder: Path | None, changed: Sequence[str] = ()) -> None:
        self._journalled = set()
        sweep(run.path)
        start_ledger(run.path, run.remade_files)
        if folder is None:
            run.journal_file.unlink(missing_ok=True)
        elif not run.journal_file.exists():
            log.warning("%s: %s", run.path, LOST_JOURNAL)
            changed = [LOST_JOURNAL, *changed]
        else:
            truncate_journal(run.journal_file, self.state.global_step)
            # The evaluation at the end of an epoch may be in the journal already while the checkpoint is from before it.
            past = read_journal(run.journal_file) if self._progress.epoch_open else []
            self._journalled = {(e.step, e.split) for e in past if isinstance(e, Evaluated)}
        self._journal = Journal(run.journal_file)
        if folder is not None:
            self._journal.append(Resumed(self.state.global_step, folder.name, (), time.time()))
            for text in changed:
                self._journal.append(Note(self.state.global_step, text))
            return
        h = self._horizon
        rows = len(self.train_dataset) if has_length(self.train_dataset) else 0
        epochs = min(float(self.args.num_train_epochs), float(h.num_epochs)) if self.args.max_steps <= 0 else 0.0
        epochs = epochs or h.num_steps / h.steps_per_epoch
        self._journal.append(RunStarted(self._run_id, 0, h.num_steps, h.steps_per_epoch, epochs, rows, time.time()))

    def _note_saved(self, folder: Path, seconds: float) -> None:
        if self._journal is not None:
            self._journal.append(Saved(self.state.global_step, folder.name, seconds))
