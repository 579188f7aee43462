"""Checkpoints that the user's own callbacks change in `on_save`: sealed as they are then, and reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunesmith.run.resealed import watch
from tunesmith.train.checkpoint import PIECES
from tunesmith.train.sharding import is_sharded
from tunesmith.train.weight_files import holds, is_weights
from tunesmith.trainer.resuming import TRAINER_STATE
from tunesmith.trainer.upstream import trainer_log


@contextlib.contextmanager
def sealing_again(folder: Path, model: Any) -> Iterator[None]:
    """Inside, callbacks may change a checkpoint: it is sealed as they leave it, and what they changed is logged."""
    before = watch(folder)
    yield
    if not folder.is_dir():
        return
    try:
        changed = before.changed()
        if not changed:
            return
        same = not is_sharded(model) and holds(folder, model)
        altered = [n for n in changed if n in (*PIECES, TRAINER_STATE) or (is_weights(n) and not same)]
        before.seal(changed, altered=altered)
    except OSError as error:
        trainer_log.warning("%s was changed by a callback and cannot be sealed again: %s", folder, error)
        return
    what = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
    effect = f"; a resume from it is not exact because of {', '.join(altered)}" if altered else ""
    trainer_log.warning("%s was changed by a callback and is sealed as it is now: %s%s", folder, what, effect)
