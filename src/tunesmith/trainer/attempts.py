"""The many runs of `hyperparameter_search`, through transformers' own backends, and the models that they begin with."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend, default_compute_objective

from tunesmith.errors import ConfigError
from tunesmith.keep.record import belongs_to
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import retire
from tunesmith.trainer.arguments import make_trainer_runtime, rows_per_rank

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


def hyperparameter_search(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **options: Any,
) -> Any:
    """The best run (BestRun), or one for each point of the front when there are several directions."""
    backend = HPSearchBackend(default_hp_search_backend() if backend is None else backend)
    if backend is not HPSearchBackend.OPTUNA:
        raise ConfigError(f"backend {backend.value!r} is not supported", fix="Use backend='optuna'.")
    if trainer.runtime.sharding is not None:
        raise ConfigError("a search with fsdp is not supported", fix="Search without fsdp, then train with it.")
    searcher = ALL_HYPERPARAMETER_SEARCH_BACKENDS[backend]()
    searcher.ensure_available()
    if trainer.model_init is None:
        raise RuntimeError("To use hyperparameter search, you need to pass your model through a model_init function.")
    trainer.hp_search_backend, trainer.hp_name = backend, hp_name
    trainer.hp_space = searcher.default_hp_space if hp_space is None else hp_space
    trainer.compute_objective = default_compute_objective if compute_objective is None else compute_objective
    search = trainer._search = TrialSearch(trainer)
    try:
        found = searcher.run(trainer, n_trials, direction, **options)
        search.take_best(found)
        return found
    finally:
        trainer.hp_search_backend = trainer._search = None


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
        """Releases weights and checkpoints of every trial but the best so far, so that a long search fills no disk."""
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

    def report(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports the score so far to a trial; a trial without prospects ends here."""
        import optuna

        trainer = self._trainer
        trainer.objective = trainer.compute_objective(dict(metrics))
        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(trainer.objective, step)
            if trial.should_prune():
                trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
                raise optuna.TrialPruned()


def call_model_init(trainer: Trainer, trial: Any = None) -> Any:
    """A fresh model from `model_init`, which may take the trial."""
    model_init = trainer.model_init
    assert model_init is not None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p for p in inspect.signature(model_init).parameters.values() if p.kind in kinds]
    if len(names) > 1:
        raise RuntimeError("model_init should have 0 or 1 argument.")
    model = model_init(trial) if names else model_init()
    if model is None:
        raise RuntimeError("model_init should not return None.")
    return model


def _best_of(trial: Any) -> int | None:
    """The number of the best trial that a study has finished; None without one, or with several objectives."""
    study = getattr(trial, "study", None)
    if study is None or study._is_multi_objective():
        return None
    try:
        return int(study.best_trial.number)
    except ValueError:
        return None
