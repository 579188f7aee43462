"""Labels that a model fitted without the row contradicts come first, and a corrected file is taken back."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from data_loading import load_data
from tunesmith.data.label_errors import (
    describe_suspects,
    format_review,
    judge_labels,
    left_out,
    rank_suspects,
    word_space,
)
from tunesmith.data.source import Part
from tunesmith.errors import DataError
from tunesmith.labels import LabelMap, Task

LABELS = LabelMap.for_classes(["cold", "warm"])


def test_left_out_predictions_equal_fits_without_the_row() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    found = left_out(x, y, np.ones(30))
    best = np.inf
    from tunesmith.data.label_errors import PENALTIES

    centered = x - x.mean(0)
    scale = np.linalg.eigvalsh(centered.T @ centered)[-1]
    for share in PENALTIES:
        plain = np.zeros_like(y)
        for row in range(30):
            rest = np.arange(30) != row
            # The intercept is free and the penalty that of all rows: the row alone is left out.
            a = np.hstack([centered[rest], np.ones((29, 1))])
            penalty = np.diag([*[share * scale + 1e-9] * 4, 0.0])
            plain[row] = np.append(centered[row], 1.0) @ np.linalg.solve(a.T @ a + penalty, a.T @ y[rest])
        error = float(((y - plain) ** 2).sum())
        if error < best:
            best, expected = error, plain
    np.testing.assert_allclose(found, expected, atol=1e-8)


def planted(count: int = 300) -> tuple[list[str], np.ndarray, np.ndarray]:
    rng = random.Random(0)
    topics = (["snow", "ice", "frost", "winter", "sledge"], ["sun", "beach", "heat", "summer", "sand"])
    ids = np.array([rng.randrange(2) for _ in range(count)])
    texts = [" ".join(rng.choice(topics[i]) for _ in range(4)) + f" day {rng.randrange(50)}" for i in ids]
    wrong = np.array(rng.sample(range(count), 15))
    given = ids.copy()
    given[wrong] = 1 - given[wrong]
    return texts, given, wrong


def test_planted_label_errors_come_first() -> None:
    texts, given, wrong = planted()
    suspects = rank_suspects(judge_labels(word_space(texts), given, LABELS), given, LABELS)
    assert {one.row for one in suspects[:15]} == set(wrong.tolist())
    assert all(one.suggested == 1 - given[one.row] for one in suspects[:15])
    part = Part.of(Dataset.from_dict({"text": texts, "labels": given}))
    judged: Any = (part, np.arange(300), given, LABELS)
    finding = describe_suspects(suspects, *judged, method="TF-IDF", review=None)[0]
    assert f"the strongest: train:{suspects[0].row + 1}, " in finding.evidence
    assert finding.severity == "info"
    assert finding.numbers["rows"] == len(suspects)
    assert describe_suspects(suspects * 3, *judged, method="TF-IDF", review="r.csv")[0].severity == "warning"


def test_a_number_far_from_what_the_other_rows_say_is_suspicious() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3))
    y = x @ [1.0, 2.0, 3.0] + 0.1 * rng.normal(size=200)
    y[17] += 8
    labels = LabelMap(("score",), Task.REGRESSION)
    suspects = rank_suspects(judge_labels(x, y, labels), y, labels)
    assert suspects[0].row == 17
    assert suspects[0].suggested == pytest.approx(y[17] - 8, abs=1)


def test_a_review_file_is_taken_back_and_checked(tmp_path: Path) -> None:
    texts, given, _ = planted(60)
    data = [{"text": text, "label": LABELS.names[i]} for text, i in zip(texts, given, strict=True)]
    suspects = rank_suspects(judge_labels(word_space(texts), given, LABELS), given, LABELS)
    review = tmp_path / "review.csv"
    written = format_review(suspects, np.arange(60), [(t,) for t in texts], given, LABELS, ["text"]).decode()
    rows = list(csv.DictReader(io.StringIO(written)))
    assert list(rows[0]) == ["row", "text", "label", "suggested_label", "why"]
    review.write_text(written.replace("row,text,label,suggested_label", "row,text,was,label"))
    options = {"train_data": data, "cache_dir": tmp_path, "validation_split_fraction": 0}
    bundle = load_data(labels_file=review, **options)
    changed = [i for i in range(60) if bundle.splits["train"]["labels"][i] != given[i]]
    assert changed == sorted(one.row for one in suspects)
    assert bundle.fingerprint != load_data(**options).fingerprint
    assert any("labels of train rows were changed by" in note for note in bundle.notes)
    for text, problem in (
        ("row,text,label\n1,another,cold\n", "another text"),
        (f"row,text,label\n1,{texts[0]},colt\n", "Did you mean 'cold'"),
        ("row,text,label\n99,x,cold\n", "the data has 60 rows"),
        ("row,text,label\nx,x,cold\n", "not a row number"),
        ("row,label\n1,cold\n", "'text' is missing"),
    ):
        review.write_text(text)
        with pytest.raises(DataError, match=problem):
            load_data(labels_file=review, **options)
