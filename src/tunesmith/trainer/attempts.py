"""A call of `train()`: what comes before the run, and the run again where memory runs out outside of a step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tunesmith.run.layout import RunDir
from tunesmith.trainer.checkpoints import find_checkpoint
from tunesmith.trainer.methods import check_overrides
from tunesmith.trainer.preparation import seed_for
from tunesmith.trainer.saving import TRAINER_STATE
from tunesmith.trainer.training import TrainerRun
from tunesmith.trainer.upstream import trainer_log

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def attempt_training(trainer: Trainer, resume: str | bool | None, trial: Any, ignore_keys: Any) -> Any:
    """A run of a Trainer, and where memory runs out outside of a step, the same run with smaller batches."""
    check_overrides(type(trainer), vars(trainer))
    if trainer.model_init is not None:
        seed_for(trainer.args)
        trainer.model = trainer.model_wrapped = trainer.call_model_init(trial)
        trainer.optimizer, trainer.lr_scheduler = None, None
        trainer._signature_columns = None
    trainer._hp_search_setup(trial)
    place = RunDir(trainer._get_output_dir(trial))
    folder = None if resume is None or resume is False else find_checkpoint(resume, str(place.path))
    if folder is not None and trainer.args.auto_find_batch_size:  # the one that was found
        found = json.loads((folder / TRAINER_STATE).read_text()).get("train_batch_size")
        trainer._train_batch_size = found or trainer._train_batch_size
    while True:
        run = trainer._parts.run = TrainerRun(trainer, place, folder, trial, ignore_keys)
        try:
            return run.train()
        except (RuntimeError, MemoryError) as error:
            if not _takes_smaller_batches(trainer, error):
                raise


def _takes_smaller_batches(trainer: Trainer, error: Exception) -> bool:
    """Whether the run begins again with smaller batches: memory ran out where no step can be repeated, in a callback
    or in the optimizer. Where it runs out in a step, the engine splits the micro-batch and nothing begins again."""
    size = trainer._train_batch_size
    if not trainer.args.auto_find_batch_size or trainer.runtime.world > 1 or size <= 1:
        return False
    if not (isinstance(error, MemoryError) or "out of memory" in str(error).lower()):
        return False
    trainer._train_batch_size = max(int(size * 0.9), 1)  # transformers' step
    if trainer._created_lr_scheduler:
        trainer.optimizer, trainer.lr_scheduler = trainer._given_optimizer, None
        trainer._created_lr_scheduler = False
    trainer_log.warning("out of memory: the run begins again with batches of %d rows", trainer._train_batch_size)
    return True
