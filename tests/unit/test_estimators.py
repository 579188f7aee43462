"""The scikit-learn estimators: scikit-learn's estimator checks, and common uses."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn import base
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks
from sklearn.utils.validation import check_is_fitted

from tiny_model import save_tiny_bert, sentences
from tunesmith import TextClassifier, TextRegressor, finetune
from tunesmith.pipeline.train import RunObserver

TEXTS = [text for text, _ in sentences(24)]
GOOD = np.array([good for _, good in sentences(24)])
NAMES = np.where(GOOD, "good", "bad")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return options for a tiny model and one step; these tests don't depend on its quality."""
    folder = tmp_path_factory.mktemp("models")
    one = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    tiny = save_tiny_bert(folder / "tiny", hidden_size=8, intermediate_size=8, **one)
    options = {"cache_dir": str(folder / "cache"), "use_cpu": True, "train_sample_size": 0, "recipe": "hf"}
    return {"model_name_or_path": str(tiny), "max_steps": 1, "options": options}


@pytest.fixture(scope="module")
def fitted(settings: dict[str, Any]) -> TextClassifier:
    return TextClassifier(**{**settings, "max_steps": 150, "learning_rate": 3e-3}).fit(TEXTS, NAMES)


CHECKS: list[Callable[[str, Any], None]] = [
    *(estimator_checks.check_estimator_cloneable, estimator_checks.check_estimator_tags_renamed),
    *(estimator_checks.check_valid_tag_types, estimator_checks.check_estimator_repr),
    *(estimator_checks.check_no_attributes_set_in_init, estimator_checks.check_mixin_order),
    *(estimator_checks.check_do_not_raise_errors_in_init_or_set_params,),
    *(estimator_checks.check_parameters_default_constructible, estimator_checks.check_get_params_invariance),
    *(estimator_checks.check_set_params,),
]
"""Checks of scikit-learn without data; the others use arrays of numbers, which are not texts."""


@pytest.mark.parametrize("estimator", [TextClassifier, TextRegressor])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sklearn_estimator_checks_pass(
    check: Callable[[str, Any], None], estimator: Any, settings: dict[str, Any]
) -> None:
    check(estimator.__name__, estimator(**settings))


WITH_DATA = (
    *("check_estimators_overwrite_params", "check_dont_overwrite_parameters", "check_estimators_fit_returns_self"),
    *(
        "check_estimators_unfitted",
        "check_n_features_in_after_fitting",
        "check_dict_unchanged",
        "check_fit_check_is_fitted",
    ),
    *("check_requires_y_none", "check_fit_idempotent", "check_methods_sample_order_invariance"),
    *("check_methods_subset_invariance", "check_fit_score_takes_y"),
)
"""Checks that use arrays of numbers but don't depend on the values: they run with every number written as a word."""


@pytest.mark.parametrize(
    ("name", "estimator"),
    [*((name, TextClassifier) for name in WITH_DATA), *((name, TextRegressor) for name in WITH_DATA[:3])],
)
def test_sklearn_checks_with_data_pass_on_numbers_as_words(name: str, estimator: Any, settings: dict[str, Any]) -> None:
    class Words(estimator):  # type: ignore[misc]
        """Estimator that accepts the arrays of the checks: the first two numbers of a row become two texts."""

        def fit(self, X: Any, y: Any) -> Any:
            done = super().fit(as_words(X), y)
            self.n_features_in_ = np.asarray(X).shape[1]
            return done

        def _probabilities(self, X: Any) -> Any:
            check_is_fitted(self)
            given, fitted = np.asarray(X).shape[1], self.n_features_in_
            if given != fitted:
                raise ValueError(f"X has {given} features, but {estimator.__name__} is expecting {fitted} features")
            self.n_features_in_ = 2
            try:
                return super()._probabilities(as_words(X))
            finally:
                self.n_features_in_ = fitted

    Words.__name__ = estimator.__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(estimator_checks, name)(estimator.__name__, Words(**settings))


def as_words(X: Any) -> Any:
    return [(f"good {a:.2f}", f"bad {b:.2f}") for a, b in np.asarray(X)[:, :2]]


def test_predictions_are_names_in_the_order_of_classes(fitted: TextClassifier) -> None:
    assert fitted.classes_.tolist() == ["bad", "good"]
    predicted = fitted.predict(TEXTS)
    table = fitted.predict_proba(TEXTS)
    assert table.shape == (24, 2)
    np.testing.assert_allclose(table.sum(axis=1), 1)
    assert predicted.tolist() == fitted.classes_[table.argmax(axis=1)].tolist()
    assert fitted.score(TEXTS, NAMES) == (predicted == NAMES).mean() > 0.8


def test_label_lists_and_indicator_columns_are_multilabel(settings: dict[str, Any]) -> None:
    lists = [["a", "b"] if good else ["b"] if i % 3 else [] for i, good in enumerate(GOOD)]
    found = TextClassifier(**settings).fit(TEXTS, lists)
    assert found.classes_.tolist() == ["a", "b"]
    assert all(set(row) <= {"a", "b"} for row in found.predict(TEXTS))
    table = pd.DataFrame({"a": GOOD.astype(int), "b": 1})
    hot = TextClassifier(**settings).fit(TEXTS, table)
    assert hot.predict(TEXTS).shape == (24, 2)
    assert 0 <= hot.score(TEXTS, table) <= 1


def test_estimator_fitted_on_pairs_refuses_single_texts(settings: dict[str, Any]) -> None:
    frame = pd.DataFrame({"question": TEXTS, "answer": TEXTS[::-1]})
    found = TextRegressor(**settings).fit(frame, np.linspace(0, 5, 24))
    assert found.predict(list(zip(TEXTS, TEXTS, strict=True))).shape == (24,)
    with pytest.raises(ValueError, match="X has 1 features, but TextRegressor is expecting 2"):
        found.predict(TEXTS)


def test_clone_pipeline_search_and_cross_validation_work(settings: dict[str, Any]) -> None:
    model = TextClassifier(**settings)
    assert base.clone(model).get_params() == model.get_params()
    pipeline = make_pipeline(FunctionTransformer(partial(list)), model)
    assert pipeline.fit(TEXTS, NAMES).predict(TEXTS).shape == (24,)
    search = GridSearchCV(model, {"learning_rate": [1e-3, 1e-2]}, cv=2).fit(TEXTS, NAMES)
    assert search.best_params_["learning_rate"] in (1e-3, 1e-2)


def test_cross_validate_in_processes_returns_fitted_estimators(settings: dict[str, Any]) -> None:
    found = cross_validate(TextClassifier(**settings), TEXTS, NAMES, cv=2, n_jobs=2, return_estimator=True)
    assert found["test_score"].shape == (2,)
    assert [estimator.predict(TEXTS[:3]).shape for estimator in found["estimator"]] == [(3,), (3,)]


def test_random_state_object_and_numpy_parameters_are_accepted(settings: dict[str, Any]) -> None:
    given = {**settings, "model_name_or_path": Path(settings["model_name_or_path"]), "max_steps": np.int64(1)}
    one, other, int_seed = (
        TextClassifier(**given, random_state=state).fit(TEXTS, NAMES)
        for state in (np.random.RandomState(0), np.random.RandomState(0), np.int64(3))
    )
    np.testing.assert_array_equal(one.predict_proba(TEXTS), other.predict_proba(TEXTS))
    assert int_seed.predict_proba(TEXTS).shape == (24, 2)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: TextClassifier(num_epochs=3), "has no parameter 'num_epochs'. Did you mean 'num_train_epochs'?"),
        (lambda: TextClassifier(lr=3), "Did you mean 'learning_rate'?"),
        (lambda: TextClassifier(class_weight="balanced"), r"Pass options=\{'class_weights': \.\.\.\}"),
        (
            lambda: TextClassifier().fit(TEXTS, NAMES, sample_weight=[1] * 24),
            "support sample_weight. To weight classes",
        ),
        (lambda: TextRegressor().fit(TEXTS, GOOD, groups=1), "TextRegressor.fit doesn't support groups"),
    ],
)
def test_unknown_parameter_is_refused_with_the_alternative(use: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        use()


def test_many_classes_train_without_warnings(settings: dict[str, Any]) -> None:
    texts = [f"{TEXTS[k % 24]} {k}" for k in range(400)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = TextClassifier(**settings).fit(texts, [f"class {k % 200}" for k in range(400)], sample_weight=None)
    assert [str(one.message) for one in seen if "sklearn" in one.filename] == []
    assert model.run_.scores["validation"]["accuracy"].n == 40
    assert len(model.classes_) == 200


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (TEXTS, NAMES[:3], "inconsistent numbers of samples"),
        (TEXTS, ["a"] * 24, "one class"),
        ([], [], "at least 2 classes|0 sample"),
        (np.zeros((24, 3)), NAMES, "3 columns"),
        (sparse.eye_array(24), NAMES, "expected a list of texts"),
        ("abc", NAMES, "one text"),
        (TEXTS, [None, *NAMES[1:]], "NaN"),
        (TEXTS, [*NAMES[1:], float("nan")], "NaN"),
        (NAMES, TEXTS, "24 different classes for 24 examples: are X and y swapped"),
        (TEXTS, GOOD * 0.5, "continuous"),
    ],
    ids=range(10),
)
def test_unfittable_data_is_refused_with_the_reason(X: Any, y: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TextClassifier().fit(X, y)


def test_text_columns_in_a_different_order_are_refused(settings: dict[str, Any]) -> None:
    frame = pd.DataFrame({"a": TEXTS, "b": TEXTS[::-1]})
    model = TextClassifier(**settings).fit(frame, NAMES)
    for fitted in (model, pickle.loads(pickle.dumps(model))):
        assert len(fitted.predict(frame)) == 24
        with pytest.raises(ValueError, match="feature names should match"):
            fitted.predict(frame[["b", "a"]])
    model.fit(TEXTS, NAMES)
    assert not hasattr(model, "feature_names_in_")


def _through_joblib(model: Any, folder: Path) -> Any:
    joblib.dump(model, folder / "model.joblib")
    return joblib.load(folder / "model.joblib")


@pytest.mark.parametrize(
    "travel",
    [lambda model, _: pickle.loads(pickle.dumps(model)), _through_joblib, lambda model, _: copy.deepcopy(model)],
    ids=["pickle", "joblib", "deepcopy"],
)
def test_copied_estimator_predicts_the_same(travel: Any, fitted: TextClassifier, tmp_path: Path) -> None:
    again = travel(fitted, tmp_path)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    assert again.classes_.tolist() == fitted.classes_.tolist()
    assert again.get_params() == fitted.get_params()
    assert travel(TextClassifier(max_steps=3), tmp_path).get_params()["max_steps"] == 3


@pytest.mark.parametrize("rare", ["good", "bad"])
def test_predict_proba_has_one_column_order_everywhere(rare: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The model's label order depends on which class is rarer; the order of columns doesn't."""
    kept = [k for k in range(24) if NAMES[k] != rare or k % 3 == 0]
    texts, names = [TEXTS[k] for k in kept], [str(NAMES[k]) for k in kept]
    options = {**settings, **settings["options"], "output_dir": tmp_path / "run", "validation_split_fraction": 0.0}
    del options["options"]
    result = finetune(texts, names, observer=RunObserver(pages=False), **options)
    assert result.labels[1] == rare
    frame = result.predictor.predict_proba(texts)
    estimator = TextClassifier(**settings).fit(texts, names)
    assert list(result.classes_) == list(frame.columns) == estimator.classes_.tolist() == ["bad", "good"]
    np.testing.assert_array_equal(result.predict_proba(texts), frame.to_numpy())
    assert result.predict(texts) == [result.classes_[k] for k in result.predict_proba(texts).argmax(axis=1)]
