"""hyperparameter_search through transformers' own backends."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunesmith.errors import ConfigError
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import retire
from tunesmith.trainer.arguments import make_trainer_runtime, rows_per_rank
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.resuming import belongs_to
from tunesmith.trainer.upstream import search, utils

log = logging.getLogger(__name__)


class SearchPart(TrainerAttributes):
    """The methods of a Trainer that search for hyperparameters."""

    hp_space: Callable[..., dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None
    _trial_folders: dict[int, Path]
    _trial_weights: dict[int, dict[str, torch.Tensor]]
    """Of the best trial so far and of the one that ended last, on the CPU: two copies at most."""

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> Any:
        """The best run (BestRun), or one for each point of the front when there are several directions."""
        backend = utils.HPSearchBackend(search.default_hp_search_backend() if backend is None else backend)
        if backend is not utils.HPSearchBackend.OPTUNA:
            raise ConfigError(f"backend {backend.value!r} is not supported", fix="Use backend='optuna'.")
        if self.runtime.sharding is not None:
            raise ConfigError("a search with fsdp is not supported", fix="Search without fsdp, then train with it.")
        searcher = search.ALL_HYPERPARAMETER_SEARCH_BACKENDS[backend]()
        searcher.ensure_available()
        if self.model_init is None:
            raise RuntimeError(
                "To use hyperparameter search, you need to pass your model through a model_init function."
            )
        self.hp_search_backend, self.hp_name = backend, hp_name
        self.hp_space = searcher.default_hp_space if hp_space is None else hp_space
        self.compute_objective = utils.default_compute_objective if compute_objective is None else compute_objective
        self._trial_folders, self._trial_weights = {}, {}
        try:
            found = searcher.run(self, n_trials, direction, **options)
            self._take_best(found)
            return found
        finally:
            self.hp_search_backend = None
            self._trial_folders, self._trial_weights = {}, {}

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from `model_init`, which may take the trial."""
        assert self.model_init is not None
        names = [
            p
            for p in inspect.signature(self.model_init).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(names) > 1:
            raise RuntimeError("model_init should have 0 or 1 argument.")
        model = self.model_init(trial) if names else self.model_init()
        if model is None:
            raise RuntimeError("model_init should not return None.")
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        """Puts the values of a trial into the arguments."""
        self._trial = trial
        if self.hp_search_backend is None or trial is None:
            return
        self._settle_trials(best_of(trial))
        self._trial_folders[trial.number] = Path(self._get_output_dir(trial))  # type: ignore[attr-defined]
        self._set_options(self.hp_space(trial))
        self._train_batch_size = rows_per_rank(self.args, self.args.train_batch_size, self.runtime.world)
        self.runtime = make_trainer_runtime(self.args, self._build_accelerator_args())  # type: ignore[attr-defined]

    def _set_options(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if not hasattr(self.args, name):
                log.warning(
                    "the search sets %s, which is no field of TrainingArguments; only model_init can use it", name
                )
                continue
            old = getattr(self.args, name)
            setattr(self.args, name, value if old is None else type(old)(value))

    def _keep_trial(self, trial: Any) -> None:
        """Keeps the weights a trial ended with until it is known whether they are the best."""
        if self.hp_search_backend is not None and trial is not None:
            weights = {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}
            self._trial_weights[trial.number] = weights

    def _settle_trials(self, best: int | None) -> None:
        """Lets go of weights and checkpoints of every trial but the best so far, so that a long search fills no disk."""
        best = self.runtime.gather_objects(best)[0]
        if best is None:
            return
        for number in [n for n in self._trial_folders if n != best]:
            self._trial_weights.pop(number, None)
            folder = self._trial_folders.pop(number)
            if self.runtime.is_main:
                for checkpoint in RunDir(folder).checkpoints():
                    if any(belongs_to(checkpoint, run_id) for run_id in self._own_runs):
                        retire(checkpoint)

    def _take_best(self, found: Any) -> None:
        """After a search with one objective: the best trial's weights in the model and its values in the arguments."""
        mine = None if found is None or isinstance(found, list) else (int(found.run_id), dict(found.hyperparameters))
        chosen = self.runtime.gather_objects(mine)[0]
        if chosen is None:
            return
        number, values = chosen
        self._settle_trials(number)
        if number not in self._trial_weights:
            return
        import optuna

        known = {n: v for n, v in values.items() if hasattr(self.args, n)}
        self._set_options(known)
        self._train_batch_size = rows_per_rank(self.args, self.args.train_batch_size, self.runtime.world)
        self.model = self.call_model_init(optuna.trial.FixedTrial(values, number)).to(self.runtime.device)
        self.model_wrapped = self.model
        self.model.load_state_dict(self._trial_weights[number])

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tells a trial how it stands; one without prospects ends here."""
        if self.hp_search_backend is None or trial is None:
            return
        import optuna

        self.objective = self.compute_objective(dict(metrics))
        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(self.objective, step)
            if trial.should_prune():
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                raise optuna.TrialPruned()


def best_of(trial: Any) -> int | None:
    """The number of the best trial that a study has finished; None without one, or with several objectives."""
    study = getattr(trial, "study", None)
    if study is None or study._is_multi_objective():
        return None
    try:
        return int(study.best_trial.number)
    except ValueError:
        return None
