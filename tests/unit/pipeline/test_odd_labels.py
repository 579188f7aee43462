"""Labels at the edge of what a task needs: one value, one class, huge and tiny numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiny_model import sentences
from tunesmith.errors import DataError


def rows(values: list[float], count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text, "label": values[i % len(values)]} for i, (text, _) in enumerate(sentences(count))]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([2.5], "there is nothing to learn"),
        ([1e12, 3e12], "is too large"),
        ([1e-300, 2e-300], "in 32 bits"),
    ],
    ids=["constant", "huge", "tiny"],
)
def test_unusable_regression_labels_are_refused(train: Any, values: list[float], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        train(train_data=rows(values), do_regression=True)


@pytest.mark.parametrize("values", [[1e8, -1e8], [1e-30, 2e-30]], ids=["large", "small"])
def test_regression_with_extreme_labels_trains(train: Any, values: list[float]) -> None:
    result, _ = train(train_data=rows(values), test_data=rows(values, 20), do_regression=True)
    assert result.run.report_file.is_file()


def test_single_label_that_is_allowed_trains(train: Any) -> None:
    data = [{"text": text, "label": "good"} for text, _ in sentences(60)]
    result, _ = train(train_data=data, allow_single_label=True)
    assert json.loads((result.run.model / "config.json").read_text())["id2label"] == {"0": "good"}
    assert result.predict(["a good film"]) == ["good"]
