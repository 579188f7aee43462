"""`tunesmith.finetune`: a table, texts and labels, a file or a config -> a trained model that predicts; and estimators for
scikit-learn."""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from tunesmith.config.load import SHORT_NAMES
from tunesmith.config.options import RunConfig, list_options
from tunesmith.data.tables import columns_table, labeled_table, refuse_labels_as_text, text_columns_of
from tunesmith.errors import ConfigError, name_the_extra, nearest
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import predicted_names
from tunesmith.labels import choose_labels
from tunesmith.pipeline import train
from tunesmith.pipeline.inputs import free_folder
from tunesmith.pipeline.train import RunObserver

if TYPE_CHECKING:
    from tunesmith.pipeline.results import RunResult


def finetune(
    data: Any = None,
    labels: Any = None,
    *,
    config: RunConfig | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    observer: RunObserver | None = None,
    **options: Any,
) -> RunResult:
    """Train, evaluate and export one run; an unfinished run in the same folder is resumed.

    `data` is a DataFrame, a dict of lists, a Dataset or DatasetDict, a list of dicts, a file name, or a
    RunConfig; with `labels`, it contains only the texts. `validation_data` and `test_data` accept the same tables. `options` are
    the options of `tunesmith train` under the same names. Progress is shown in the terminal or the notebook cell;
    `observer=RunObserver()` shows nothing.
    """
    if isinstance(data, RunConfig):
        data, config = None, data
    elif isinstance(data, (str, Path)):
        data, options["train_file"] = None, data
    if data is not None and train_data is not None:
        raise ConfigError("the training data is passed twice", fix="Pass either data or train_data.")
    rows = train_data if data is None else data
    try:
        if labels is not None:
            if len(names := tuple(text_columns_of(rows))) > 2:
                options.setdefault("text_column_names", names)
            rows = labeled_table(rows, labels)
        tables = {"train_data": rows, "validation_data": validation_data, "test_data": test_data}
        return _train(config, observer, **tables, **options)
    except ModuleNotFoundError as error:
        name_the_extra(error, "finetune")
        raise


def _train(config: RunConfig | None, observer: RunObserver | None, **given: Any) -> RunResult:
    """Train a run, with progress in the notebook or terminal."""
    if observer is not None:
        return train.finetune(config, observer=observer, **given)
    from tunesmith.cli.console import Console

    console = Console(bars=True if in_notebook() else None)
    try:
        return train.finetune(config, observer=console.observer(), **given)
    finally:
        console.close()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


@dataclass(frozen=True)
class Targets:
    """`column` goes into the training table under `names`; `classes` are the same labels as the user wrote them."""

    column: list[Any]
    classes: Any
    names: tuple[str, ...]
    multilabel: bool = False
    hot: bool = False
    """y was a table of 0 and 1."""


def as_targets(y: Any) -> Targets:
    """Return the classes of y: 1-D values, a table of 0 and 1, or lists of labels."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    shape = getattr(y, "shape", None)
    rows = list(y) if shape is None else y
    if shape is None and any(isinstance(row, (list, tuple, set, frozenset)) for row in rows):
        if all(isinstance(row, (list, tuple)) for row in rows) and _is_hot(rows):
            return _hot_targets(np.asarray(rows), [str(k) for k in range(len(rows[0]))])
        return _list_targets(rows)
    if shape is None:
        _refuse_missing(rows)  # an array of text would hold 'nan'
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] > 1:
        return _hot_targets(array, [str(name) for name in getattr(y, "columns", range(array.shape[1]))])
    if array.ndim == 2:
        array = array.ravel()
    if array.dtype == object and len(array) and isinstance(array[0], (list, tuple, set, np.ndarray)):
        return _list_targets(list(array))
    _refuse_missing(array.tolist())
    if array.dtype.kind in "UO" and len(set(array.tolist())) == len(array) >= 10:
        raise ValueError(f"y has {len(array)} different classes for {len(array)} examples: are X and y swapped?")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")
        check_classification_targets(array)
    classes, ids = np.unique(array, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y has only one class, {classes.tolist()}: a classifier needs at least 2 classes")
    names = tuple(str(value) for value in classes.tolist())
    return Targets([names[i] for i in ids.tolist()], classes, names)


def as_numbers(y: Any) -> list[float]:
    """Return y as one finite number per example."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None")
    try:
        array = np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("y contains values that are not numbers; a regressor needs one number per example") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array.ravel()
    if array.ndim != 1:
        raise ValueError(f"y has the shape {array.shape}, expected one number per example")
    if not np.isfinite(array).all():
        raise ValueError("Input y contains NaN or infinity.")
    return [float(value) for value in array]


def _refuse_missing(values: list[Any]) -> None:
    if any(value is None or value != value for value in values):
        raise ValueError("Input y contains NaN: every example needs a class.")


def _is_hot(rows: list[Any]) -> bool:
    lengths = {len(row) for row in rows}
    flat = [v for row in rows for v in row]
    return (
        len(lengths) == 1
        and lengths != {1}
        and bool(flat)
        and all(not isinstance(v, str) and v in (0, 1) for v in flat)
    )


def _hot_targets(array: Any, names: list[str]) -> Targets:
    if not np.isin(array, (0, 1)).all():
        raise ValueError("a 2-D y must contain only 0 and 1, with a column for each label")
    column = [[names[i] for i in np.flatnonzero(row)] for row in array]
    return Targets(column, np.asarray(names), tuple(names), multilabel=True, hot=True)


def _list_targets(rows: list[Any]) -> Targets:
    found = sorted({label for row in rows for label in row})
    if not found:
        raise ValueError("y contains only empty lists")
    names = tuple(map(str, found))
    return Targets([[str(v) for v in row] for row in rows], np.asarray(found), names, multilabel=True)


HOLD_OUT_ROWS = 50
"""With this many examples or more, a tenth is held out for validation by default."""


def _temporary_folder(owner: Any) -> str:
    """Create a folder that is removed with its owner."""
    folder = tempfile.mkdtemp(prefix="tunesmith-")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


class _FittedModel:
    """A model folder. Pickles and copies contain its files, which are written to a temporary folder when they are loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def predictor(self) -> Predictor:
        """The model, loaded when it is first used."""
        return Predictor.load(self.folder)

    def __getstate__(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.folder.iterdir() if file.is_file()}

    def __setstate__(self, files: dict[str, bytes]) -> None:
        self.folder = Path(_temporary_folder(self))
        for name, data in files.items():
            (self.folder / name).write_bytes(data)


def _suggest_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Refuse an unknown parameter with a suggestion."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(self: Any, *args: Any, **params: Any) -> None:
        for name in params.keys() - known.keys():
            hint = "`tunesmith train --help_all` lists all options."
            if found := SHORT_NAMES.get(name) or nearest(name, tuple(list_options())):
                hint = f"Did you mean {found!r}?" if found in known else f"Pass options={{{found!r}: ...}}."
            raise TypeError(f"{type(self).__name__} has no parameter {name!r}. {hint}")
        init(self, *args, **params)

    return checked


class _TextEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class. Parameters are options of `tunesmith train`; `options` contains all others."""

    @_suggest_parameters
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

    def _fit(self, X: Any, column: list[Any], unsupported: dict[str, Any], **options: Any) -> Self:
        for name in [name for name, value in unsupported.items() if value is not None]:
            fix = "To weight classes, pass options={'class_weights': 'balanced'}." if name == "sample_weight" else ""
            raise TypeError(f"{type(self).__name__}.fit doesn't support {name}. {fix}".rstrip())
        columns = text_columns_of(X)
        rows = len(next(iter(columns.values())))
        if rows != len(column):
            raise ValueError(f"Found input variables with inconsistent numbers of samples: {[rows, len(column)]}")
        if rows == 0:
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        refuse_labels_as_text(columns, column)
        # The names of three or more columns are part of the text.
        names = tuple(columns) if len(columns) > 2 else tuple(f"text_{k}" for k in range(1, len(columns) + 1))
        label = "label" if "label" not in names else "the_label"
        table = columns_table(dict(zip(names, columns.values(), strict=True)) | {label: column})
        folder = (
            str(free_folder(Path(self.output_dir))) if self.output_dir else str(Path(_temporary_folder(self)) / "run")
        )
        given = self._given_options()
        fraction = self.validation_split_fraction
        if fraction is None and rows < HOLD_OUT_ROWS:
            fraction = 0.0
        if fraction is not None:
            given["validation_split_fraction"] = fraction
        self.run_ = finetune(
            table,
            text_column_names=names,
            label_column_name=label,
            output_dir=folder,
            observer=None if self.verbose else RunObserver(pages=self.output_dir is not None),
            **{**options, **given},
        )
        self._model = _FittedModel(self.run_.run.model)
        self.n_features_in_ = len(columns)
        if hasattr(X, "columns"):
            self.feature_names_in_ = np.asarray(list(X.columns), dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def _given_options(self) -> dict[str, Any]:
        """Return parameters that were set, under the names of options."""
        own = {k: v for k, v in self.get_params(deep=False).items() if v is not None}
        for name in ("options", "verbose", "output_dir", "validation_split_fraction"):
            own.pop(name, None)
        if "random_state" in own:
            state = own.pop("random_state")
            own["seed"] = state if isinstance(state, Integral) else check_random_state(state).randint(2**31 - 1)
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in own.items()}
        return {**plain, **(self.options or {})}

    @property
    def predictor_(self) -> Predictor:
        """Return the trained model, loaded when it is first used."""
        check_is_fitted(self)
        return self._model.predictor

    def __getstate__(self) -> dict[str, Any]:
        """Return everything except `run_`: pickles, joblib files and copies don't need the run folder."""
        return {name: value for name, value in super().__getstate__().items() if name != "run_"}

    def _probabilities(self, X: Any) -> Any:
        check_is_fitted(self)
        columns = list(text_columns_of(X).values())
        if len(columns) != self.n_features_in_:
            kind = type(self).__name__
            raise ValueError(f"X has {len(columns)} features, but {kind} is expecting {self.n_features_in_} features")
        known = list(getattr(self, "feature_names_in_", ()))
        if hasattr(X, "columns") and known and list(X.columns) != known:
            raise ValueError(f"The feature names should match those that were passed during fit: {known}")
        if len(columns) > 2:
            return self.predictor_.probabilities(
                dict(zip(self.predictor_.facts.text_columns or (), columns, strict=True))
            )
        return self.predictor_.probabilities(columns[0], columns[1] if len(columns) == 2 else None)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.target_tags.required = True
        tags.non_deterministic = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_model")


class TextClassifier(ClassifierMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes an encoder on texts and classes. X: texts or pairs; y: names, ids, lists of labels, or 0/1 columns.

    Parameters that are None have the defaults of `tunesmith train`; `options` accepts all its other options.
    """

    def fit(self, X: Any, y: Any, **unsupported: Any) -> Self:
        """Train on X and y. With 50 examples or more, a tenth is held out to choose the best step."""
        targets = as_targets(y)
        self._targets = targets
        self._fit(X, targets.column, unsupported, label_names=targets.names, do_regression=False)
        self.classes_ = targets.classes
        return self

    def predict(self, X: Any) -> Any:
        """Return the class of each text, in the form of y: names, ids, lists of labels, or 0/1 columns."""
        probabilities = self._probabilities(X)
        if self._targets.multilabel:
            chosen = self._choose(probabilities)
            return chosen.astype(np.int64) if self._targets.hot else [self.classes_[row].tolist() for row in chosen]
        return self.classes_[self._choose(probabilities)]

    def _choose(self, probabilities: Any) -> Any:
        labels = self.predictor_.facts.labels
        return choose_labels(probabilities, labels.task, labels.thresholds)

    def predict_proba(self, X: Any) -> Any:
        """Return one row of probabilities for each text, in the order of `classes_`."""
        return self._probabilities(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy; for multilabel y, the share of examples with all labels right."""
        if getattr(self, "_targets", None) is not None and self._targets.multilabel:
            rows = zip(self.predict(X), np.asarray(y) if self._targets.hot else y, strict=True)
            right = [np.array_equal(a, b) if self._targets.hot else set(a) == set(b) for a, b in rows]
            return float(np.average(right, weights=sample_weight))
        return float(super().score(X, y, sample_weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class TextRegressor(RegressorMixin, _TextEstimator):  # type: ignore[misc]
    """Fine-tunes an encoder on texts and numbers. X: texts or pairs; y: one number per example."""

    def fit(self, X: Any, y: Any, **unsupported: Any) -> Self:
        """Train on X and y. With 50 examples or more, a tenth is held out to choose the best step."""
        return self._fit(X, as_numbers(y), unsupported, do_regression=True)

    def predict(self, X: Any) -> Any:
        """Return one number for each text."""
        values = self._probabilities(X)
        return np.asarray(predicted_names(values, self.predictor_.facts.labels))
