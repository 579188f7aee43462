"""The trials of `hyperparameter_search`: their values in the arguments, and what is kept of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import retire
from tunesmith.trainer.arguments import make_trainer_runtime, rows_per_rank
from tunesmith.training.checkpoint import belongs_to

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


class TrialSearch:
    """One search for hyperparameters: the trials it made, and what is kept of them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._folders: dict[int, Path] = {}
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        """Of the best trial so far and of the one that ended last, on the CPU: two copies at most."""

    def begin_trial(self, trial: Any) -> None:
        """Puts the values of a trial into the arguments."""
        trainer = self._trainer
        self._settle(_best_of(trial))
        self._folders[trial.number] = Path(trainer._get_output_dir(trial))
        self._set_options(trainer.hp_space(trial))
        trainer.runtime = make_trainer_runtime(trainer.args, trainer._build_accelerator_args())

    def _set_options(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if not hasattr(self._trainer.args, name):
                log.warning(
                    "the search sets %s, which is not a field of TrainingArguments; only model_init can use it", name
                )
                continue
            old = getattr(self._trainer.args, name)
            setattr(self._trainer.args, name, value if old is None else type(old)(value))
        runtime, args = self._trainer.runtime, self._trainer.args
        self._trainer._train_batch_size = rows_per_rank(args, args.train_batch_size, runtime.world)

    def keep(self, trial: Any) -> None:
        """Keeps the weights a trial ended with until it is known whether they are the best."""
        own = self._trainer.model.state_dict()
        self._weights[trial.number] = {k: v.detach().to("cpu", copy=True) for k, v in own.items()}

    def _settle(self, best: int | None) -> None:
        """Drops weights and checkpoints of every trial but the best so far, so that a long search does not fill the disk."""
        best = self._trainer.runtime.gather_objects(best)[0]
        if best is None:
            return
        for number in [n for n in self._folders if n != best]:
            self._weights.pop(number, None)
            folder = self._folders.pop(number)
            if self._trainer.runtime.is_main:
                for checkpoint in RunDir(folder).checkpoints():
                    if any(belongs_to(checkpoint, run_id) for run_id in self._trainer._run_ids):
                        retire(checkpoint)

    def take_best(self, found: Any) -> None:
        """After a search with one objective: the best trial's weights in the model and its values in the arguments."""
        mine = None if found is None or isinstance(found, list) else (int(found.run_id), dict(found.hyperparameters))
        chosen = self._trainer.runtime.gather_objects(mine)[0]
        if chosen is None:
            return
        number, values = chosen
        self._settle(number)
        if number not in self._weights:
            return
        import optuna

        known = {n: v for n, v in values.items() if hasattr(self._trainer.args, n)}
        self._set_options(known)
        trainer = self._trainer
        trainer.model = trainer.call_model_init(optuna.trial.FixedTrial(values, number)).to(trainer.runtime.device)
        trainer.model_wrapped = trainer.model
        trainer.model.load_state_dict(self._weights[number])


def _best_of(trial: Any) -> int | None:
    """The number of the best trial that a study has finished; None without one, or with several objectives."""
    study = getattr(trial, "study", None)
    if study is None or study._is_multi_objective():
        return None
    try:
        return int(study.best_trial.number)
    except ValueError:
        return None
