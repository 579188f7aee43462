"""scikit-learn estimators over a training session: `fit(X, y)`, `predict`, `score`, and what pipelines and searches need."""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from tunesmith.data.in_memory import columns_table, text_columns_of
from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.files import read_json
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import predicted_names
from tunesmith.labels import choose_labels
from tunesmith.notebook.from_data import finetune_data
from tunesmith.notebook.targets import Targets, as_numbers, as_targets
from tunesmith.pipeline.identity import free_folder
from tunesmith.pipeline.watch import Watch
from tunesmith.runs.sealed import MANIFEST, write_sealed
from tunesmith.runs.writing import write_new

ESTIMATOR_FILE = "estimator.json"
HOLD_OUT_ROWS = 50
"""From this many rows on, a tenth is held out for validation unless the user says otherwise."""


class _TextEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: parameters are options of a run, `options` holds those that are no parameter."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuses a name that is not a parameter with the way to give it: scikit-learn needs a plain signature."""
        known = cls._get_param_names()
        for name in given:
            if name not in known:
                near = did_you_mean(name, known)
                fix = near or f"An option of a run goes into options={{{name!r}: ...}}."
                raise TypeError(f"{cls.__name__} has no parameter {name!r}. {fix}")
        return object.__new__(cls)

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        num_train_epochs: float | None = None,
        max_steps: int | None = None,
        learning_rate: float | None = None,
        per_device_train_batch_size: int | None = None,
        max_seq_length: int | None = None,
        validation_split_fraction: float | None = None,
        random_state: int | None = None,
        output_dir: str | None = None,
        options: dict[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.model_name_or_path = model_name_or_path
        self.num_train_epochs = num_train_epochs
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.per_device_train_batch_size = per_device_train_batch_size
        self.max_seq_length = max_seq_length
        self.validation_split_fraction = validation_split_fraction
        self.random_state = random_state
        self.output_dir = output_dir
        self.options = options
        self.verbose = verbose

    def _fit(self, X: Any, column: list[Any], **options: Any) -> Self:
        columns = text_columns_of(X)
        rows = len(next(iter(columns.values())))
        if rows != len(column):
            raise ValueError(f"Found input variables with inconsistent numbers of samples: {[rows, len(column)]}")
        if rows == 0:
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        table = columns_table({f"text_{k}": v for k, v in enumerate(columns.values(), 1)} | {"label": column})
        names = tuple(f"text_{k}" for k in range(1, len(columns) + 1))
        folder = str(free_folder(Path(self.output_dir))) if self.output_dir else self._temporary_folder()
        given = self._given_options()
        fraction = self.validation_split_fraction
        if fraction is None and rows < HOLD_OUT_ROWS:
            fraction = 0.0
        if fraction is not None:
            given["validation_split_fraction"] = fraction
        self.run_ = finetune_data(
            table,
            text_column_names=names,
            label_column_name="label",
            output_dir=folder,
            watch=None if self.verbose else Watch(pages=self.output_dir is not None),
            **{**options, **given},
        )
        self.predictor_ = self.run_.predictor
        self.n_features_in_ = len(columns)
        if hasattr(X, "columns"):
            self.feature_names_in_ = np.asarray(list(X.columns), dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def _given_options(self) -> dict[str, Any]:
        """Parameters that were set, under the names of options."""
        own = {k: v for k, v in self.get_params(deep=False).items() if v is not None}
        for name in ("options", "verbose", "output_dir", "validation_split_fraction"):
            own.pop(name, None)
        if "random_state" in own:
            own["seed"] = int(own.pop("random_state"))
        return {**own, **(self.options or {})}

    def _temporary_folder(self) -> str:
        """A folder that is removed with this estimator (a new fit makes a new one)."""
        folder = tempfile.mkdtemp(prefix="tunesmith-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return str(Path(folder) / "run")

    def _probabilities(self, X: Any) -> Any:
        check_is_fitted(self, "predictor_")
        columns = list(text_columns_of(X).values())
        if len(columns) != self.n_features_in_:
            kind = type(self).__name__
            raise ValueError(f"X has {len(columns)} features, but {kind} is expecting {self.n_features_in_} features")
        known = list(getattr(self, "feature_names_in_", ()))
        if hasattr(X, "columns") and known and list(X.columns) != known:
            raise ValueError(f"The feature names should match those that were passed during fit: {known}")
        return self.predictor_.probabilities(columns[0], columns[1] if len(columns) == 2 else None)

    def save(self, folder: str | Path) -> Path:
        """Writes the model and the parameters to a new sealed folder: safetensors and JSON, no pickle."""
        check_is_fitted(self, "predictor_")
        target = Path(folder).expanduser()
        if target.exists():
            raise ConfigError("exists already", where=str(target), fix="Give a new folder.")
        state = {"kind": type(self).__name__, "params": self.get_params(deep=False), **self._fitted_state()}

        def fill(place: Path) -> None:
            for file in self._model_folder().iterdir():
                if file.name not in (MANIFEST, ESTIMATOR_FILE):
                    shutil.copyfile(file, place / file.name)
            write_new(place / ESTIMATOR_FILE, json.dumps(state, indent=1, ensure_ascii=False).encode())

        write_sealed(target, fill, {"kind": "model"})
        return target

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The fitted estimator that `save` wrote."""
        source = Path(folder).expanduser()
        state = read_json(source / ESTIMATOR_FILE)
        if state.get("kind") != cls.__name__:
            raise ConfigError(f"holds a {state.get('kind')}, not a {cls.__name__}", where=str(source))
        found = cls(**state["params"])
        found.predictor_ = Predictor.load(source)
        found._folder = source
        found.n_features_in_ = int(state["n_features_in"])
        found._restore(state)
        return found

    def _model_folder(self) -> Path:
        return self.run_.run.model if hasattr(self, "run_") else self._folder

    def _fitted_state(self) -> dict[str, Any]:
        return {"n_features_in": self.n_features_in_, "feature_names_in": list(getattr(self, "feature_names_in_", ()))}

    def _restore(self, state: dict[str, Any]) -> None:
        """Takes in what `_fitted_state` gave out."""
        if state.get("feature_names_in"):
            self.feature_names_in_ = np.asarray(state["feature_names_in"], dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.target_tags.required = True
        tags.non_deterministic = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "predictor_")


_parameters = list(inspect.signature(_TextEstimator.__init__).parameters.values())[1:]
_TextEstimator.__signature__ = inspect.Signature(_parameters)  # that of __init__: `__new__` would hide it


class TextClassifier(ClassifierMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes an encoder on texts and classes. X: texts or pairs; y: names, ids, lists of labels, or 0/1 columns.

    Parameters that are None have the defaults of `tunesmith train`; `options` takes any other option of it by name.

    >>> TextClassifier(num_train_epochs=2).fit(texts, labels).predict(["new text"])  # doctest: +SKIP
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on all rows; with 50 rows or more a tenth of them chooses the best step (`validation_split_fraction`)."""
        targets = as_targets(y)
        self._targets = targets
        self._fit(X, targets.column, label_names=targets.names, do_regression=False)
        self.classes_ = targets.classes
        return self

    def predict(self, X: Any) -> Any:
        """The class of each text, as it was in y; a 0/1 table or lists of labels where y was one."""
        probabilities = self._probabilities(X)
        if self._targets.multilabel:
            chosen = self._choose(probabilities)
            return chosen.astype(np.int64) if self._targets.hot else [self.classes_[row].tolist() for row in chosen]
        return self.classes_[self._choose(probabilities)]

    def _choose(self, probabilities: Any) -> Any:
        labels = self.predictor_.facts.labels
        return choose_labels(probabilities, labels.task, labels.thresholds)

    def predict_proba(self, X: Any) -> Any:
        """One row of probabilities for each text, in the order of `classes_`."""
        return self._probabilities(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Mean accuracy; for several labels a row, the share of rows in which all are right."""
        if getattr(self, "_targets", None) is not None and self._targets.multilabel:
            truth = self._targets.hot_rows(y)
            right = (self._choose(self._probabilities(X)) == truth).all(axis=1)
            return float(np.average(right, weights=sample_weight))
        return float(super().score(X, y, sample_weight))

    def _fitted_state(self) -> dict[str, Any]:
        return {**super()._fitted_state(), "targets": self._targets.to_json()}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._targets = Targets.from_json(state["targets"])
        self.classes_ = self._targets.classes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class TextRegressor(RegressorMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes an encoder on texts and numbers. X: texts or pairs; y: one number a row."""

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on all rows; with 50 rows or more a tenth of them chooses the best step (`validation_split_fraction`)."""
        return self._fit(X, as_numbers(y), do_regression=True)

    def predict(self, X: Any) -> Any:
        """One number for each text."""
        values = self._probabilities(X)
        return np.asarray(predicted_names(values, self.predictor_.facts.labels))
