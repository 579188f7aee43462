"""Calls of `train()`: what comes before the run, the run again where memory runs out outside of a step, and the many runs of
`hyperparameter_search` through transformers' own backends.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.errors import ConfigError
from tunesmith.keep.weight_files import belongs_to
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import retire
from tunesmith.trainer.arguments import make_trainer_runtime, rows_per_rank
from tunesmith.trainer.checkpoints import find_checkpoint
from tunesmith.trainer.saving import TRAINER_STATE
from tunesmith.trainer.stepping import seed_for
from tunesmith.trainer.training import TrainerRun
from tunesmith.trainer.upstream import search, trainer_log, utils
from tunesmith.trainer.validation import check_overrides

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


log = logging.getLogger(__name__)


class TrialSearch:
    """The search for hyperparameters of one Trainer: the runs it made, and what is kept of them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.run_ids: set[str] = set()
        """The runs that this Trainer made: checkpoints of others are never removed."""
        self._folders: dict[int, Path] = {}
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        """Of the best trial so far and of the one that ended last, on the CPU: two copies at most."""

    def run(self, space: Any, objective: Any, n_trials: int, direction: Any, backend: Any, **options: Any) -> Any:
        """The best run (BestRun), or one for each point of the front when there are several directions."""
        trainer = self._trainer
        backend = utils.HPSearchBackend(search.default_hp_search_backend() if backend is None else backend)
        if backend is not utils.HPSearchBackend.OPTUNA:
            raise ConfigError(f"backend {backend.value!r} is not supported", fix="Use backend='optuna'.")
        if trainer.runtime.sharding is not None:
            raise ConfigError("a search with fsdp is not supported", fix="Search without fsdp, then train with it.")
        searcher = search.ALL_HYPERPARAMETER_SEARCH_BACKENDS[backend]()
        searcher.ensure_available()
        if trainer.model_init is None:
            raise RuntimeError(
                "To use hyperparameter search, you need to pass your model through a model_init function."
            )
        trainer.hp_search_backend = backend
        trainer.hp_space = searcher.default_hp_space if space is None else space
        trainer.compute_objective = utils.default_compute_objective if objective is None else objective
        try:
            found = searcher.run(trainer, n_trials, direction, **options)
            self._take_best(found)
            return found
        finally:
            trainer.hp_search_backend = None
            self._folders, self._weights = {}, {}

    def begin_trial(self, trial: Any) -> None:
        """Puts the values of a trial into the arguments."""
        trainer = self._trainer
        if trainer.hp_search_backend is None or trial is None:
            return
        self._settle(best_of(trial))
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
        if self._trainer.hp_search_backend is not None and trial is not None:
            weights = {k: v.detach().to("cpu", copy=True) for k, v in self._trainer.model.state_dict().items()}
            self._weights[trial.number] = weights

    def _settle(self, best: int | None) -> None:
        """Releases weights and checkpoints of every trial but the best so far, so that a long search fills no disk."""
        best = self._trainer.runtime.gather_objects(best)[0]
        if best is None:
            return
        for number in [n for n in self._folders if n != best]:
            self._weights.pop(number, None)
            folder = self._folders.pop(number)
            if self._trainer.runtime.is_main:
                for checkpoint in RunDir(folder).checkpoints():
                    if any(belongs_to(checkpoint, run_id) for run_id in self.run_ids):
                        retire(checkpoint)

    def _take_best(self, found: Any) -> None:
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

    def report(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports the score so far to a trial; a trial without prospects ends here."""
        trainer = self._trainer
        if trainer.hp_search_backend is None or trial is None:
            return
        import optuna

        trainer.objective = trainer.compute_objective(dict(metrics))
        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(trainer.objective, step)
            if trial.should_prune():
                trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
                raise optuna.TrialPruned()


def new_model(model_init: Callable[..., Any], trial: Any) -> Any:
    """A fresh model from `model_init`, which may take the trial."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p for p in inspect.signature(model_init).parameters.values() if p.kind in kinds]
    if len(names) > 1:
        raise RuntimeError("model_init should have 0 or 1 argument.")
    model = model_init(trial) if names else model_init()
    if model is None:
        raise RuntimeError("model_init should not return None.")
    return model


def best_of(trial: Any) -> int | None:
    """The number of the best trial that a study has finished; None without one, or with several objectives."""
    study = getattr(trial, "study", None)
    if study is None or study._is_multi_objective():
        return None
    try:
        return int(study.best_trial.number)
    except ValueError:
        return None
