"""The numbers of the report equal those computed by hand; missing files are tolerated."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.errors import CheckpointError
from tunesmith.report.build import build_report, diagnose_run
from tunesmith.report.predictions import (
    PredictedRows,
    count_confusions,
    count_labels,
    find_mistakes,
    headline_scores,
    make_predictions,
)
from tunesmith.runs.folder import RunDir, RunLock

COLUMNS: dict[str, list[Any]] = {
    "row": [0, 1, 2, 3, 4],
    "text": ["a b", "c", "d", "e", "f"],
    "label": ["no", "yes", "yes", "no", None],
    "prediction": ["no", "no", "no", "yes", "yes"],
    "prob_no": [0.9, 0.6, 0.8, 0.3, 0.1],
    "prob_yes": [0.1, 0.4, 0.2, 0.7, 0.9],
}


SUMMARY = {"task": "binary", "labels": ["no", "yes"], "columns": {"text": ["text"], "label": "label"}}


def predictions(**changes: Any) -> PredictedRows:
    found = make_predictions(COLUMNS | changes, SUMMARY)
    assert found is not None
    return found


def test_report_prefers_test_split_over_validation() -> None:
    found = predictions(split=["test", "test", "validation", "validation", "validation"])
    assert found.split == "test"
    assert found.row.tolist() == [0, 1]
    unlabeled = predictions(split=["validation"] * 4 + ["test"])
    assert unlabeled.split == "validation"


def test_confusion_matrix_counts_true_by_predicted() -> None:
    found = count_confusions(predictions())
    assert found is not None
    assert found.counts == ((1, 1), (2, 0))
    first = found.pairs[0]
    assert (first.true, first.predicted, first.rows, first.share) == ("yes", "no", 2, 1.0)
    assert (first.example.row, first.example.confidence) == (2, 0.8), "the one with the highest confidence"


def test_labels_are_sorted_by_f1_worst_first() -> None:
    labels = ["a", "a", "a", "b", "b", "c"]
    columns = {"text": labels, "label": labels, "prediction": ["a", "a", "b", "b", "b", "a"]}
    found = make_predictions(columns, {"task": "multiclass", "labels": ["a", "b", "c", "d"]})
    assert found is not None
    counts = count_labels(found)
    assert [(c.name, c.rows, c.precision, c.recall) for c in counts] == [
        ("c", 1, None, 0.0),
        ("a", 3, 2 / 3, 2 / 3),
        ("b", 2, 2 / 3, 1.0),
        ("d", 0, None, None),
    ]
    assert [c.f1 for c in counts] == [0.0, pytest.approx(2 / 3), pytest.approx(0.8), None]
    assert all(c.low <= c.f1 <= c.high for c in counts if c.f1 is not None)


def test_mistakes_are_sorted_by_confidence() -> None:
    found = find_mistakes(predictions())
    assert [(m.row, m.label, m.predicted, m.confidence) for m in found] == [
        (2, "yes", "no", 0.8),
        (3, "no", "yes", 0.7),
        (1, "yes", "no", 0.6),
    ]


SEVERAL: dict[str, list[Any]] = {
    "text": ["a", "b", "c", "d", "e"],
    "label": [["red"], ["red", "blue"], [], ["blue"], None],
    "prediction": [["red"], ["red"], ["blue"], ["red"], ["red"]],
    "prob_red": [0.9, 0.8, 0.1, 0.7, 0.9],
    "prob_blue": [0.2, 0.1, 0.6, 0.3, 0.9],
}


def test_multilabel_counts_are_per_label() -> None:
    found = make_predictions(SEVERAL, {"task": "multilabel", "labels": ["red", "blue"]})
    assert found is not None
    assert found.names == ("red", "blue")
    assert found.right.tolist() == [True, False, False, False]
    assert count_confusions(found) is None
    counts = {c.name: (c.rows, c.found, c.extra, c.recall, c.precision) for c in count_labels(found)}
    assert counts == {"blue": (2, 0, 1, 0.0, 0.0), "red": (2, 2, 1, 1.0, 2 / 3)}
    mistakes = [(m.label, m.predicted, m.confidence) for m in find_mistakes(found)]
    # row 1 misses blue (confidence 0.9); row 3 misses blue and wrongly has red (both 0.7); row 2 wrongly has blue (0.6)
    assert mistakes == [("red, blue", "red", 0.9), ("blue", "red", pytest.approx(0.7)), ("none", "blue", 0.6)]


def test_scores_come_first_from_metrics_json(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    synthetic.make_folder(tmp_path, synthetic.make_run([0.5, 0.3, 0.2], [0.5, 0.4, 0.4]))
    score = {"value": 0.81, "low": 0.77, "high": 0.84, "n": 408, "method": "wilson"}
    (tmp_path / "metrics.json").write_text(
        json.dumps({"validation": {"precision": score, "loss": 0.4}, "test": {"accuracy": 0.8}})
    )
    found = build_report(tmp_path).scores
    assert [(s.split, s.name, s.value) for s in found] == [
        ("test", "accuracy", 0.8),
        ("validation", "precision", 0.81),
        ("validation", "loss", 0.4),
    ]
    assert (found[1].low, found[1].n) == (0.77, 408)


def test_scores_fall_back_to_best_step_of_event_log(synthetic: SimpleNamespace) -> None:
    from tunesmith.runs.event_log import curves_from_events

    curves = curves_from_events(synthetic.make_run([0.5, 0.3, 0.2], [0.5, 0.4, 0.4], accuracy=[0.7, 0.9, 0.8]))
    found = {s.name: s for s in headline_scores({}, curves)}
    assert found["accuracy"].value == 0.9
    assert found["accuracy"].low is not None
    assert 0.86 < found["accuracy"].low < 0.9
    assert found["loss"].low is None


def test_damaged_file_is_named(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    synthetic.make_folder(tmp_path, synthetic.make_run([0.5], [0.5]))
    (tmp_path / "data_summary.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"data_summary\.json: is not JSON"):
        build_report(tmp_path)
    (tmp_path / "data_summary.json").unlink()
    (tmp_path / "predictions.parquet").write_bytes(b"no parquet")
    with pytest.raises(CheckpointError, match=r"predictions\.parquet: cannot be read as Parquet"):
        build_report(tmp_path)


def test_headline_is_the_metric_for_best_model(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    found = build_report(synthetic.make_split_folder(tmp_path, kind="many"))
    assert found.headline is not None
    assert (found.headline.split, found.headline.name, found.headline.value) == ("test", "f1_macro", 0.6)
    assert found.explained is not None
    assert found.explained.split == "test"
    assert [score.n for score in found.baselines["TF-IDF + linear model"]] == [100, 100]
    assert [f.severity for f in found.data_findings] == ["error", "warning"]
    facts = dict(found.facts)
    assert facts["started"] == "14 November 2023, 22:13 UTC"
    assert facts["duration"] == "12 min 34 s"


def test_running_run_is_still_learning_until_process_ends(tmp_path: Path, synthetic: SimpleNamespace) -> None:
    synthetic.make_folder(
        tmp_path,
        synthetic.make_run(
            [0.60, 0.52, 0.42], [0.59, 0.52, 0.44], accuracy=[0.69, 0.74, 0.80], planned_epochs=9, ended=None
        ),
    )
    with RunLock(RunDir(tmp_path).lock_file):
        assert diagnose_run(tmp_path)[0].code == "still_learning"
        assert build_report(tmp_path).findings[0].code == "still_learning"
    assert diagnose_run(tmp_path)[0].code == "stopped_too_early"
