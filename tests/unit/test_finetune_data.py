"""`finetune` on data in memory, and the methods of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset

from data_loading import load_data
from tiny_model import save_tiny_bert, sentences
from tunesmith import finetune
from tunesmith.data.tables import text_columns_of
from tunesmith.errors import ConfigError, DataError
from tunesmith.pipeline.train import RunObserver

TEXTS = [text for text, _ in sentences(40)]
LABELS = ["good" if good else "bad" for _, good in sentences(40)]
FRAME = pd.DataFrame({"text": TEXTS, "label": LABELS})


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    quick: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-3, "use_cpu": True, "train_sample_size": 0}
    return {"model_name_or_path": save_tiny_bert(folder / "tiny"), "cache_dir": folder / "cache", **quick}


def test_tables_of_any_type_load_the_same_rows() -> None:
    forms = [
        dict(FRAME.items()),
        {"text": TEXTS, "label": np.array(LABELS)},
        Dataset.from_pandas(FRAME),
        FRAME.to_dict("records"),
    ]
    expected = load_data(train_data=FRAME).fingerprint
    assert [load_data(train_data=form).fingerprint for form in forms] == [expected] * 4


def test_separate_texts_and_labels_train_a_model(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = finetune(np.array(TEXTS), pd.Series(LABELS), output_dir=tmp_path / "run", **options)
    shown = capsys.readouterr().err
    assert "Training: 2 steps, 0.4 epochs of 36 rows." in shown
    assert result.labels == ("bad", "good")
    assert set(result.predict(TEXTS[:3])) <= {"bad", "good"}
    assert result.predict_proba(FRAME).shape == (40, 2)
    scores = result.evaluate(FRAME)
    assert scores["accuracy"].n == 40
    assert result.report().read_text(encoding="utf-8").startswith("<!doctype html>")
    assert repr(result).startswith("RunResult(")
    assert "\n" not in repr(result)
    page = result._repr_html_()
    assert "accuracy" in page
    assert "data:image/svg+xml;base64," in page
    with pytest.raises(ValueError, match="expects one text"):
        result.predict([("a", "b")])


@pytest.mark.parametrize(
    ("texts", "message"),
    [("abc", "one text"), ([1.5], "float"), ([None], "missing"), (7, "got int"), ([("a", "b"), "c"], "mixed")],
)
def test_texts_of_wrong_type_are_refused_with_expected_type(texts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        text_columns_of(texts)


def test_pairs_and_two_columns_are_two_text_columns() -> None:
    assert text_columns_of([("a", "b"), ["c", "d"]]) == {"text": ["a", "c"], "text_pair": ["b", "d"]}
    assert text_columns_of(pd.DataFrame({"q": ["a"], "p": ["b"]})) == {"q": ["a"], "p": ["b"]}
    assert text_columns_of(np.array([["a", "b"]])) == {"text": ["a"], "text_pair": ["b"]}


def test_unequal_columns_or_duplicate_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="different lengths: text 2, label 1"):
        finetune({"text": ["a", "b"], "label": ["c"]}, output_dir=tmp_path, observer=RunObserver())
    with pytest.raises(ConfigError, match="twice"):
        finetune(FRAME, train_data=FRAME)


def test_question_about_columns_names_the_options(tmp_path: Path) -> None:
    tiny = save_tiny_bert(tmp_path / "tiny")
    rows = pd.DataFrame({"text": [t for t, _ in sentences(20)], "queue": list("ab") * 10, "team": list("cd") * 10})
    with pytest.raises(DataError, match="Set for example --text_column_names text --label_column_name queue"):
        finetune(rows, model_name_or_path=str(tiny), observer=RunObserver())
