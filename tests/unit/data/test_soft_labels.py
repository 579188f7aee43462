"""Labels with probabilities: one column per class, or a label with a confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_loading import load_data
from tiny_model import sentences, write_csv
from tunesmith.data.read import DataBundle
from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import Task

Rows = list[dict[str, Any]]
COLUMNS = "p_neg,p_neu,p_pos"


def soft(count: int = 30) -> Rows:
    chances = ((0.7, 0.2, 0.1), (0.1, 0.5, 0.4), (0.0, 0.1, 0.9))
    names = COLUMNS.split(",")
    return [
        {"text": text, **dict(zip(names, chances[i % 3], strict=True))} for i, (text, _) in enumerate(sentences(count))
    ]


def sure(count: int = 30) -> Rows:
    return [
        {"text": text, "label": "abc"[i % 3], "sure": 0.4 + i % 3 / 10} for i, (text, _) in enumerate(sentences(count))
    ]


def load(path: Path, rows: Rows, **options: Any) -> DataBundle:
    write_csv(path / "train.csv", rows)
    defaults = {"label_column_name": COLUMNS, "validation_split_fraction": 0.0}
    return load_data(train_file=path / "train.csv", cache_dir=path / "cache", **{**defaults, **options})


def test_probability_columns_are_targets_of_named_classes(tmp_path: Path) -> None:
    bundle = load(tmp_path, soft())
    targets = bundle.parts["train"].targets()
    assert bundle.labels.names == ("neg", "neu", "pos")
    assert bundle.labels.task is Task.MULTICLASS
    assert targets is not None
    assert targets[:3] == pytest.approx(np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.0, 0.1, 0.9]]))
    assert bundle.splits["train"]["labels"][:3] == [0, 1, 2]
    assert any("Metrics use the most probable class" in note for note in bundle.notes)


def test_targets_follow_held_out_and_sampled_rows(tmp_path: Path) -> None:
    bundle = load(tmp_path, soft(60), validation_split_fraction=0.2, max_train_samples=20)
    part = bundle.parts["train"]
    targets, labels = part.targets(), np.asarray(part.labels())
    assert targets is not None
    assert targets.shape == (20, 3)
    assert (targets.argmax(1) == labels).all()
    held_out = bundle.parts["validation"]
    assert len(held_out) == 12
    assert set(np.asarray(held_out.labels())) == {0, 1, 2}


def test_changed_probability_changes_the_fingerprint(tmp_path: Path) -> None:
    rows = soft()
    first = load(tmp_path, rows).fingerprint
    rows[4] |= {"p_neu": 0.51, "p_pos": 0.39}
    assert load(tmp_path, rows).fingerprint != first


def test_test_file_may_have_certain_labels(tmp_path: Path) -> None:
    test = [
        {"text": text, "p_neg": 0, "p_neu": i % 2, "p_pos": (i + 1) % 2}
        for i, (text, _) in enumerate(sentences(6, seed=7))
    ]
    bundle = load(tmp_path, soft(), test_file=write_csv(tmp_path / "test.csv", test))
    assert bundle.splits["test"]["labels"] == [2, 1, 2, 1, 2, 1]


def test_order_of_a_trained_head_is_kept(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", soft())
    bundle = load_data(
        train_file=tmp_path / "train.csv",
        label_column_name=COLUMNS,
        head_names=("pos", "neg", "neu"),
        cache_dir=tmp_path,
    )
    targets = bundle.parts["train"].targets()
    assert bundle.labels.names == ("pos", "neg", "neu")
    assert targets is not None
    assert (targets.argmax(1) == np.asarray(bundle.parts["train"].labels())).all()


def test_zero_one_columns_are_still_several_labels(tmp_path: Path) -> None:
    rows = [{**row, "p_neg": 1, "p_neu": i % 2, "p_pos": 0} for i, row in enumerate(soft())]
    assert load(tmp_path, rows).labels.task is Task.MULTILABEL


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"p_neg": -0.1, "p_neu": 0.5, "p_pos": 0.6}, r"train.csv:7:p_neg: the probability -0.1 is negative"),
        ({"p_neg": "nan"}, r"train.csv:7:p_neg: 'nan' is not a number"),
        ({"p_pos": ""}, r"train.csv:7:p_pos: the number is missing"),
        ({"p_neg": 0.9}, r"train.csv:7:p_neg,p_neu,p_pos: the probabilities sum to 1.2000, expected 1"),
        ({"p_neg": 0.685}, r"sum to 0.985"),
    ],
)
def test_invalid_probabilities_are_refused_with_row_and_column(cells: Rows, expected: str, tmp_path: Path) -> None:
    rows = soft()
    rows[5] |= {"p_neg": 0.7, "p_neu": 0.2, "p_pos": 0.1} | cells
    with pytest.raises(DataError, match=expected) as caught:
        load(tmp_path, rows)
    assert caught.value.exit_code == 3


def test_sum_within_the_tolerance_is_scaled_to_one(tmp_path: Path) -> None:
    rows = soft()
    rows[5] |= {"p_neg": 0.692, "p_neu": 0.2, "p_pos": 0.1}
    targets = load(tmp_path, rows).parts["train"].targets()
    assert targets is not None
    assert targets.sum(1) == pytest.approx(np.ones(30), abs=1e-6)


def test_confidence_is_put_on_the_label_and_the_rest_spread(tmp_path: Path) -> None:
    bundle = load(tmp_path, sure(), label_column_name="label", label_confidence_column_name="sure")
    targets = bundle.parts["train"].targets()
    assert targets is not None
    assert targets[:3] == pytest.approx(np.array([[0.4, 0.3, 0.3], [0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]))
    assert not any("Not used" in note for note in bundle.notes)


def test_invalid_confidence_is_refused_with_row_and_column(tmp_path: Path) -> None:
    rows = sure()
    rows[5]["sure"] = 95
    with pytest.raises(DataError, match=r"train.csv:7:sure: 95 is not a probability. .*divide percentages by 100"):
        load(tmp_path, rows, label_column_name="label", label_confidence_column_name="sure")
    with pytest.raises(DataError, match=r"no column 'shure'.*--label_confidence_column_name"):
        load(tmp_path, rows, label_column_name="label", label_confidence_column_name="shure")


def test_confidence_of_probability_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a single label column"):
        load(tmp_path, [{**row, "sure": 1} for row in soft()], label_confidence_column_name="sure")
