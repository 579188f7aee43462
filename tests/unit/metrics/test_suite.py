"""Metrics match scikit-learn, scipy and values computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk

from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import Task
from tunesmith.metrics.table import (
    GLUE,
    METRICS,
    greater_is_better,
    load_metric,
    make_suite,
    metric_names,
    sigmoid,
    softmax,
)


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_single_label_metrics_equal_scikit_learn(k, seed):
    rng = np.random.default_rng(seed)
    y, logits = rng.integers(0, k, 300), rng.normal(size=(300, k))
    logits[np.arange(300), y] += 1.0
    task = Task.BINARY if k == 2 else Task.MULTICLASS
    got = make_suite(task, names=metric_names(task)).compute(logits, y)
    p, prob = logits.argmax(1), softmax(logits)
    want = {
        "accuracy": sk.accuracy_score(y, p),
        "f1_macro": sk.f1_score(y, p, average="macro"),
        "f1_weighted": sk.f1_score(y, p, average="weighted"),
        "balanced_accuracy": sk.balanced_accuracy_score(y, p),
        "matthews_correlation": sk.matthews_corrcoef(y, p),
        "log_loss": sk.log_loss(y, prob),
        "auroc": sk.roc_auc_score(y, prob[:, 1]) if k == 2 else sk.roc_auc_score(y, prob, multi_class="ovr"),
    }
    if k == 2:
        want |= {
            "f1": sk.f1_score(y, p),
            "precision": sk.precision_score(y, p),
            "recall": sk.recall_score(y, p),
            "average_precision": sk.average_precision_score(y, prob[:, 1]),
        }
    assert got == pytest.approx(want, abs=1e-12)


def test_classes_missing_on_one_side_count_as_in_sklearn():
    y, p = np.array([0, 0, 1, 1, 1]), np.array([0, 2, 1, 1, 0])
    got = make_suite(Task.MULTICLASS, names=["f1_macro", "balanced_accuracy"]).compute(p, y)
    assert got["f1_macro"] == pytest.approx(sk.f1_score(y, p, average="macro"))
    assert got["balanced_accuracy"] == pytest.approx(sk.recall_score(y, p, labels=[0, 1], average="macro"))


def test_regression_metrics_equal_scipy_and_scikit_learn():
    rng = np.random.default_rng(2)
    y = np.round(rng.uniform(0, 5, 200), 1)
    p = y + rng.normal(size=200)
    got = make_suite(Task.REGRESSION).compute(p[:, None], y)
    want = {
        "pearson": scipy.stats.pearsonr(y, p)[0],
        "spearmanr": scipy.stats.spearmanr(y, p)[0],
        "mse": sk.mean_squared_error(y, p),
        "mae": sk.mean_absolute_error(y, p),
        "r2": sk.r2_score(y, p),
    }
    assert got == pytest.approx(want, abs=1e-12)


def test_multilabel_metrics_equal_scikit_learn():
    rng = np.random.default_rng(3)
    y = (rng.random((250, 5)) < 0.4).astype(np.float32)
    logits = rng.normal(size=(250, 5)) + y
    got = make_suite(Task.MULTILABEL).compute(logits, y)
    p = logits > 0
    want = {
        "f1_micro": sk.f1_score(y, p, average="micro"),
        "f1_macro": sk.f1_score(y, p, average="macro"),
        "subset_accuracy": sk.accuracy_score(y, p),
        "auroc": sk.roc_auc_score(y, sigmoid(logits), average="macro"),
    }
    assert got == pytest.approx(want, abs=1e-12)
    as_decisions = make_suite(Task.MULTILABEL).compute(p.astype(int), y)
    assert as_decisions["f1_micro"] == got["f1_micro"]
    assert as_decisions["auroc"] is None


def test_mcc_is_zero_or_undefined_with_one_class():
    suite = make_suite(Task.BINARY, glue_task="cola")
    assert suite.compute([1, 1, 1], [1, 0, 1]) == {"matthews_correlation": 0.0}
    assert suite.compute([1, 0, 1], [1, 1, 1]) == {"matthews_correlation": None}


def test_auroc_distinguishes_logits_beyond_softmax_precision():
    logits = np.array([[0.0, 40.0], [0.0, 50.0], [0.0, 45.0], [0.0, 60.0]])
    assert make_suite(Task.BINARY, names=["auroc"]).compute(logits, [0, 1, 0, 1]) == {"auroc": 1.0}


@pytest.mark.parametrize("task", list(Task))
def test_metrics_of_no_examples_are_none(task):
    suite = make_suite(task, names=metric_names(task))
    assert set(suite.compute([], []).values()) == {None}
    assert set(suite.compute().values()) == {None}
    scores = suite.compute_with_intervals([], [])
    assert {(s.value, s.low, s.high, s.n) for s in scores.values()} == {(None, None, None, 0)}


@pytest.mark.parametrize("task", [Task.BINARY, Task.MULTICLASS])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_single_class_leaves_undefined_metrics_none(task, n):
    suite = make_suite(task, names=metric_names(task))
    scores = suite.compute_with_intervals(np.tile([2.0, -1.0], (n, 1)), np.zeros(n, int))
    assert scores["auroc"].value is None
    assert scores["matthews_correlation"].value is None
    assert scores["accuracy"].value == 1.0
    assert scores["accuracy"].low < 0.5
    for score in scores.values():
        assert score.value is None or (math.isfinite(score.value) and score.n == n)


def test_unlabeled_examples_are_excluded():
    suite = make_suite(Task.BINARY, names=["accuracy"])
    scores = suite.compute_with_intervals([1, 0, 1, 1], [1, -1, 0, -100])
    assert (scores["accuracy"].value, scores["accuracy"].n) == (0.5, 2)
    values = make_suite(Task.REGRESSION, names=["mae"]).compute_with_intervals([1.0, 9.0, 2.0], [1.5, np.nan, 2.5])
    assert (values["mae"].value, values["mae"].n) == (0.5, 2)
    labels = make_suite(Task.MULTILABEL).compute_with_intervals([[1, 0], [1, 1]], [[1, 0], [-1, -1]])
    assert (labels["subset_accuracy"].value, labels["subset_accuracy"].n) == (1.0, 1)


@pytest.mark.parametrize("task", list(Task))
def test_nan_prediction_makes_metrics_none_with_warning(task, caplog):
    y = [0, 1, 1] if task is not Task.MULTILABEL else [[0, 1], [1, 0], [1, 1]]
    p = [0.1, np.nan, 2.0] if task is Task.REGRESSION else [[0.1, 0.2], [np.nan, 1.0], [0.3, 2.0]]
    assert set(make_suite(task).compute(p, y).values()) == {None}
    assert "NaN or infinite" in caplog.text


@pytest.mark.parametrize(
    ("task", "predictions", "references", "words"),
    [
        (Task.BINARY, [0, 1], [0], "shape"),
        (Task.BINARY, [0, 1], [0, 2], "reference 2"),
        (Task.BINARY, [0, 5], [0, 1], "prediction 5"),
        (Task.BINARY, [0.3, 0.7], [0, 1], "fractions"),
        (Task.MULTICLASS, [[1, 2, 3]], [3], "reference 3"),
        (Task.MULTICLASS, [0, 1], [0, -7], "reference -7"),
        (Task.MULTICLASS, ["a", "b"], ["a", "b"], "numbers"),
        (Task.MULTILABEL, [[1, 0]], [[1, 0, 1]], "multilabel"),
        (Task.MULTILABEL, [[1, 0]], [[2, 0]], "0 or 1"),
        (Task.REGRESSION, [[1.0, 2.0]], [1.0], "one value per example"),
    ],
)
def test_mismatched_predictions_raise_data_error(task, predictions, references, words):
    with pytest.raises(DataError, match=words):
        make_suite(task).compute(predictions, references)


def test_unknown_metric_error_suggests_nearest_name():
    with pytest.raises(ConfigError, match=r"Did you mean 'accuracy'.*balanced_accuracy"):
        make_suite(Task.BINARY, names=["acuracy"])
    with pytest.raises(ConfigError, match=r"not defined for a multiclass task.*f1_macro"):
        make_suite(Task.MULTICLASS, names=["f1"])
    with pytest.raises(ConfigError, match="Did you mean 'mrpc'"):
        make_suite(Task.BINARY, glue_task="mrcp")
    with pytest.raises(ConfigError, match="regression task"):
        make_suite(Task.BINARY, glue_task="stsb")


def test_aliases_and_prefixes_map_to_one_name():
    suite = make_suite(Task.BINARY, names=["mcc", "eval_f1", "macro_f1", "matthews_correlation"])
    assert suite.names == ("matthews_correlation", "f1", "f1_macro")
    assert suite.metric_for_best_model == "matthews_correlation"


@pytest.mark.parametrize("name", list(GLUE))
def test_glue_tasks_report_keys_of_evaluate_library(name):
    want = {"cola": ("matthews_correlation",), "stsb": ("pearson", "spearmanr")}
    want |= dict.fromkeys(("mrpc", "qqp"), ("accuracy", "f1"))
    assert load_metric("glue", name).names == want.get(name, ("accuracy",))


@pytest.mark.parametrize("task", list(Task))
def test_batches_equal_one_call_and_are_then_cleared(task):
    rng = np.random.default_rng(5)
    y = {Task.REGRESSION: rng.random(37), Task.MULTILABEL: rng.integers(0, 2, (37, 3))}.get(task)
    y = rng.integers(0, 2 if task is Task.BINARY else 3, 37) if y is None else y
    p = rng.normal(size=37) if task is Task.REGRESSION else rng.normal(size=(37, 2 if task is Task.BINARY else 3))
    suite, once = make_suite(task), make_suite(task).compute(p, y)
    for start in range(0, 37, 8):
        suite.add_batch(predictions=p[start : start + 8], references=y[start : start + 8])
    assert suite.compute() == once
    assert set(suite.compute().values()) == {None}
    suite.add_batch(predictions=p[:-2], references=y[:-2])
    assert suite.compute(predictions=p[-2:], references=y[-2:]) == once


def test_predictions_without_references_raise():
    with pytest.raises(ConfigError, match="go together"):
        make_suite(Task.BINARY).compute(predictions=[1])


def test_suite_imports_neither_torch_nor_scipy():
    code = "import sys, tunesmith.metrics.table; print(sorted({'torch', 'scipy', 'sklearn', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_direction_comes_from_table_or_name_ending() -> None:
    lower = {m.name for m in METRICS if not greater_is_better(m.name)}
    assert lower == {"log_loss", "mse", "mae"}
    assert not any(map(greater_is_better, ("loss", "my_loss", "rmse", "token_error", "brier", "dev_mse")))
    assert all(map(greater_is_better, ("bleu", "lossless", "exact_match")))
