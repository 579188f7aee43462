"""Labels at the edge of what a task needs: one value, one class, huge and tiny numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tiny_model import sentences


def rows(values: list[float], count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text, "label": values[i % len(values)]} for i, (text, _) in enumerate(sentences(count))]


@pytest.mark.parametrize(
    "values", [[2.5], [1e12, 3e12], [1e-300, 2e-300], [0.0, 5e-324], [-1e30, 1e30]], ids=["constant", "huge", "tiny", "denormal", "wide"]
)
@pytest.mark.parametrize("pages", [True])
def test_regression_with_odd_labels_trains(train: Any, values: list[float], pages: bool) -> None:
    result, _ = train(train_data=rows(values), test_data=rows(values, 20), do_regression=True, allow_single_label=True)
    assert result.run.report_file.is_file()


def test_single_label_that_is_allowed_trains(train: Any, tmp_path: Path) -> None:
    data = [{"text": text, "label": "good"} for text, _ in sentences(60)]
    result, _ = train(train_data=data, allow_single_label=True)
    assert json.loads((result.run.model / "config.json").read_text())["id2label"] == {"0": "good"}
    assert result.predict(["a good film"]) == ["good"]
    assert math.isfinite(result.scores["validation"]["loss"].value)
