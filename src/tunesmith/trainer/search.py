"""hyperparameter_search through transformers' own backends."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.trainer.arguments import make_trainer_runtime
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.upstream import search, utils

log = logging.getLogger(__name__)


class SearchPart(TrainerAttributes):
    """The methods of a Trainer that search for hyperparameters."""

    hp_space: Callable[..., dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None

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
        searcher = search.ALL_HYPERPARAMETER_SEARCH_BACKENDS[backend]()
        searcher.ensure_available()
        if self.model_init is None:
            raise RuntimeError(
                "To use hyperparameter search, you need to pass your model through a model_init function."
            )
        self.hp_search_backend, self.hp_name = backend, hp_name
        self.hp_space = searcher.default_hp_space if hp_space is None else hp_space
        self.compute_objective = utils.default_compute_objective if compute_objective is None else compute_objective
        try:
            return searcher.run(self, n_trials, direction, **options)
        finally:
            self.hp_search_backend = None

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
        for name, value in self.hp_space(trial).items():
            if not hasattr(self.args, name):
                log.warning(
                    "the search sets %s, which is no field of TrainingArguments; only model_init can use it", name
                )
                continue
            old = getattr(self.args, name)
            setattr(self.args, name, value if old is None else type(old)(value))
        self._train_batch_size = self.args.train_batch_size
        self.runtime = make_trainer_runtime(self.args)

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
