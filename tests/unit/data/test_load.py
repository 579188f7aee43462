"""From files to splits: columns and task are found and explained, labels match by name, splits don't leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from data_loading import load_data, make_config
from tunesmith.data.columns import infer_columns
from tunesmith.data.hub import load_dataset
from tunesmith.data.read import DataBundle, read_source
from tunesmith.data.rows import Columns, Part, draw_fold, draw_split
from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import LabelMap, Task
from tunesmith.sklearn import TextClassifier, TextRegressor

Rows = list[dict[str, Any]]


WORDS = ["red", "blue", "green", "round", "square", "small", "large", "new"]


def rows(count: int, labels: list[Any], *, text: str = "text", label: str = "label") -> Rows:
    return [{text: f"the {WORDS[i % 8]} thing number {i}", label: labels[i % len(labels)]} for i in range(count)]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., DataBundle]:
    def go(train: Any, **options: Any) -> DataBundle:
        return load_data(train_data=train, cache_dir=tmp_path, **options)

    return go


def columns_of(data: Rows, **options: Any) -> Columns:
    return infer_columns({"train": read_source(data, name="train")}, make_config(**options))


@pytest.mark.parametrize(
    "pair",
    [
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question1", "question2"),
        ("question", "sentence"),
        ("text", "text_pair"),
        ("text_a", "text_b"),
    ],
)
def test_pair_columns_are_recognized_by_name(pair: tuple[str, str]) -> None:
    data = [{"idx": str(i), "label": "ab"[i % 2], pair[1]: f"b {i}", pair[0]: f"a {i}"} for i in range(4)]
    found = columns_of(data)
    assert (found.text, found.label, found.task) == (pair, "label", Task.BINARY)
    assert all(why.endswith(".") for why in found.why)
    assert found.why[3:] == ("Not used: 'idx' (tunesmith audit measures whether a column helps).",)


@pytest.mark.parametrize(
    ("row", "text", "label"),
    [
        ({"Text": "a b", "Label": "x"}, ("Text",), "Label"),
        ({"review": "a b", "sentiment": "x"}, ("review",), "sentiment"),
        ({"id": "7", "headline_text": "some words here", "target": "x"}, ("headline_text",), "target"),
        ({"doc_id": "d 1", "left": "some words", "right": "more words", "class": "x"}, ("left", "right"), "class"),
        ({"unnamed_1": "0", "body": "some words", "verdict": "x"}, ("body",), "verdict"),
        ({"word": "one", "pos_tag": "x"}, None, None),
    ],
)
def test_columns_are_found_by_their_content(row: dict[str, str], text: Any, label: Any) -> None:
    data = [{**row, list(row)[-1]: "xy"[i % 2]} for i in range(6)]
    if text is None:
        with pytest.raises(DataError, match=r"which column contains the text .*--label_column_name pos_tag"):
            columns_of(data)
    else:
        found = columns_of(data)
        assert (found.text, found.label) == (text, label)


def test_user_specified_columns_take_precedence() -> None:
    data = [{"text": "a b", "other": "c d", "label": "x", "stars": str(i % 5)} for i in range(10)]
    found = columns_of(data, text_column_names="other, text", label_column_name="stars", do_regression=True)
    assert (found.text, found.label, found.task) == (("other", "text"), "stars", Task.REGRESSION)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["a", "b"], Task.BINARY),
        (["a", "b", "c"], Task.MULTICLASS),
        ([0, 1], Task.BINARY),
        (["0", "1", "2"], Task.MULTICLASS),
        ([True, False], Task.BINARY),
        ([0.0, 1.0], Task.BINARY),
        ([0.5, 1.0], Task.REGRESSION),
        (["0.5", "3", "1e0"], Task.REGRESSION),
        ([["a"], ["a", "b"], []], Task.MULTILABEL),
    ],
)
def test_task_follows_from_the_labels(labels: list[Any], task: Task) -> None:
    assert columns_of(rows(12, labels)).task is task


def test_labels_are_matched_by_name_in_every_split(load: Callable[..., DataBundle]) -> None:
    train = rows(20, ["neg", "pos"])
    bundle = load(train, validation_data=rows(3, ["pos"]), test_data=rows(4, ["-1"]))
    assert bundle.labels == LabelMap(("neg", "pos"), Task.BINARY)
    assert bundle.splits["train"]["labels"][:4] == [0, 1, 0, 1]
    assert bundle.splits["validation"]["labels"][:] == [1, 1, 1]
    assert bundle.splits["test"]["labels"][:] == [-1] * 4
    assert any("4 of 4 test rows are unlabeled" in note for note in bundle.notes)


def test_class_labels_in_different_orders_match_by_name(load: Callable[..., DataBundle]) -> None:
    def made(names: list[str], ids: list[int]) -> Dataset:
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        return Dataset.from_dict({"text": [f"a {i}" for i in ids], "label": ids}, features=features)

    bundle = load(DatasetDict({"train": made(["no", "yes"], [0, 1] * 5), "dev": made(["yes", "no"], [0, 1])}))
    assert bundle.labels.names == ("no", "yes")
    assert bundle.splits["validation"]["labels"][:] == [1, 0]


@pytest.mark.parametrize(
    ("labels", "options", "names", "first"),
    [
        (["10", "9", "2"], {}, ("2", "9", "10"), [2, 1, 0]),
        ([1, 0], {"label_names": "bad,good"}, ("bad", "good"), [1, 0]),
        (["1", "5"], {"label_names": ["low", "high"]}, ("low", "high"), [0, 1]),
        (["b", "a"], {"label_names": ["b", "a"]}, ("b", "a"), [0, 1]),
        (["-1", "1"], {"label_names": "-1,1"}, ("-1", "1"), [0, 1]),
        ([1, 0], {"task_name": "sst2", "text_column_names": "text"}, ("negative", "positive"), [1, 0]),
        (["007", "7"], {}, ("007", "7"), [0, 1]),
        ([True, False], {}, ("false", "true"), [1, 0]),
    ],
)
def test_label_names_and_their_order(
    labels: Any, options: Any, names: Any, first: Any, load: Callable[..., DataBundle]
) -> None:
    bundle = load(rows(30, labels), validation_split_fraction=0, **options)
    assert bundle.labels.names == names
    assert bundle.splits["train"]["labels"][: len(first)] == first


def test_regression_and_multilabel_labels_are_encoded(load: Callable[..., DataBundle]) -> None:
    bundle = load(rows(20, ["0.5", "2", "-1e1"]), test_data=rows(2, ["-1"]))
    assert bundle.labels == LabelMap(("label",), Task.REGRESSION)
    assert bundle.splits["train"].features["labels"] == Value("float32")
    assert np.isnan(bundle.splits["test"]["labels"][:]).all()
    bundle = load(rows(20, [["b"], [], ["a", "b"]]), validation_split_fraction=0)
    assert bundle.labels == LabelMap(("a", "b"), Task.MULTILABEL)
    assert bundle.splits["train"]["labels"][:3] == [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert bundle.splits["train"].features["labels"] == List(Value("float32"))


def test_validation_split_is_stratified_and_seeded(load: Callable[..., DataBundle]) -> None:
    train = rows(200, ["a"] * 15 + ["b"] * 4 + ["c"])
    bundle = load(train, seed=3)
    counts = np.bincount(bundle.splits["validation"]["labels"][:])
    assert counts.tolist() == [15, 4, 1]
    assert bundle.splits["train"].num_rows == 180
    assert any("20 of 200 train rows held out" in note and "seed 3" in note for note in bundle.notes)
    assert load(train, seed=3).fingerprint == bundle.fingerprint
    assert load(train, seed=4).fingerprint != bundle.fingerprint
    texts = set(bundle.splits["train"]["text"][:]) | set(bundle.splits["validation"]["text"][:])
    assert texts == {row["text"] for row in train}
    assert set(load(train, validation_split_fraction=0).splits) == {"train"}


def split(data: list[dict[str, Any]], *columns: str) -> tuple[Dataset, Dataset]:
    whole = Dataset.from_list(data)
    drawn = draw_split(Part.of(whole), val_fraction=0.1, seed=0, task=Task.BINARY, text_columns=columns)
    return whole.select(drawn[0]), whole.select(drawn[1])


def test_rows_that_share_a_sentence_stay_in_one_split() -> None:
    data = [{"a": f"s{i // 2}", "b": f"T{i}", "labels": i % 2} for i in range(400)]
    train, validation = split(data, "a", "b")
    assert not set(train["a"][:]) & set(validation["a"][:])
    assert validation.num_rows == 40
    assert train["b"][:] == sorted(train["b"][:], key=lambda t: int(t[1:])), "file order is kept"


def test_fully_linked_rows_are_still_held_out(load: Callable[..., DataBundle]) -> None:
    """Every query with every answer makes one group of 400 pairs; 6 pairs are separate."""
    linked = [(f"query {i % 40}", f"answer {i % 37}", i % 2) for i in range(400)]
    alone = [(f"lone query {i}", f"lone answer {i}", i % 2) for i in range(6)]
    data = [{"text": a, "text_pair": b, "label": ["no", "yes"][c]} for a, b, c in linked + alone]
    bundle = load(data, seed=3)
    assert bundle.splits["validation"].num_rows == 40, "a tenth, not only the few unlinked pairs"
    assert set(bundle.splits["validation"]["text"][:]) & set(bundle.splits["train"]["text"][:])
    (note,) = [note for note in bundle.notes if "held out" in note]
    assert "linked to train rows by a text" in note
    assert "kept together" not in note


def test_sample_keeps_class_shares(load: Callable[..., DataBundle]) -> None:
    data = [{"text": f"text number {i}", "label": "rare" if i % 25 == 24 else "ab"[i % 2]} for i in range(100)]
    sorted_by_label = sorted(data, key=lambda row: row["label"])
    limits = {"max_train_samples": 10, "max_eval_samples": 25}
    bundle = load(sorted_by_label, validation_data=data, test_data=data, **limits)
    assert [bundle.splits[s].num_rows for s in ("train", "validation", "test")] == [10, 25, 25]
    counts = {s: Counter(bundle.splits[s]["label"][:]) for s in ("train", "validation", "test")}
    assert counts["validation"] == {"a": 12, "b": 12, "rare": 1}
    assert counts["train"]["rare"] == counts["test"]["rare"] == 1
    assert any(note.startswith("Sample: 10 of 100 train rows") for note in bundle.notes)
    again = load(sorted_by_label, validation_data=data, test_data=data, **limits)
    assert again.fingerprint == bundle.fingerprint
    assert (
        load(sorted_by_label, validation_data=data, test_data=data, **limits, seed=1).fingerprint != bundle.fingerprint
    )


def test_fingerprint_depends_on_content_and_order(load: Callable[..., DataBundle], tmp_path: Path) -> None:
    data = rows(30, ["a", "b"])
    one = load(data).fingerprint
    pd.DataFrame(data).to_csv(tmp_path / "x.csv", index=False)
    assert load_data(train_file=tmp_path / "x.csv", cache_dir=tmp_path).fingerprint == one
    pd.DataFrame(data).to_parquet(tmp_path / "x.parquet")
    assert load_data(train_file=tmp_path / "x.parquet", cache_dir=tmp_path).fingerprint == one
    assert load([*data[2:], *data[:2]]).fingerprint != one
    assert load([{**data[0], "text": data[0]["text"] + " "}, *data[1:]]).fingerprint != one
    shifted = [{"text": "ab", "label": "a"}, {"text": "c", "label": "b"}]
    other = [{"text": "a", "label": "a"}, {"text": "bc", "label": "b"}]
    assert (
        load(shifted, validation_split_fraction=0).fingerprint != load(other, validation_split_fraction=0).fingerprint
    )


def test_mnli_splits_get_their_names(load: Callable[..., DataBundle]) -> None:
    data = [{"premise": f"p {i}", "hypothesis": f"h {i}", "label": i % 3} for i in range(9)]
    names = ("train", "validation_matched", "validation_mismatched", "test_matched", "unsupervised")
    bundle = load(DatasetDict({name: Dataset.from_list(data) for name in names}), task_name="mnli")
    assert list(bundle.splits) == ["train", "validation", "test", "validation_mismatched"]
    assert bundle.labels.names == ("entailment", "neutral", "contradiction")
    assert "Split 'unsupervised' is not used." in bundle.notes


def test_splits_of_a_dataset_can_be_named(load: Callable[..., DataBundle]) -> None:
    data = DatasetDict({name: Dataset.from_list(rows(20, ["a", "b"])) for name in ("train", "small", "fold1", "test")})
    bundle = load(data, train_split_name="small", validation_split_name="fold1")
    assert list(bundle.splits) == ["train", "validation", "test"]
    assert "Split 'train' is not used." in bundle.notes
    with pytest.raises(DataError, match=r"no split 'fold'; found: train, .*Did you mean 'fold1'"):
        load(data, validation_split_name="fold")


def test_missing_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--train_file"):
        load_data()
    with pytest.raises(DataError, match="no train split, only test"):
        load_data(test_data=rows(2, ["a"]))


def write_rows(path: Path, texts: list[str], labels: list[Any]) -> Path:
    path.write_text("text,label\n" + "".join(f"{t},{v}\n" for t, v in zip(texts, labels, strict=True)))
    return path


@pytest.mark.parametrize("labels", [[50_000_000 + 0.01 * i for i in range(40)], [1e-300 * i for i in range(1, 41)]])
def test_labels_equal_in_float32_are_refused(labels: list[float], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], labels)
    with pytest.raises(DataError, match=r"x.csv:\d+:label: .* in 32 bits.*rescale them"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_too_large_regression_labels_are_refused(tmp_path: Path) -> None:
    labels = [1700000000000.5 + 1000 * i for i in range(40)]
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], labels)
    with pytest.raises(DataError, match=r"x.csv:2:label: .* is too large.* Rescale the labels"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_constant_regression_labels_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], [0.5] * 40)
    with pytest.raises(DataError, match=r"all 40 rows have the label 0\.5: there is nothing to learn"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


@pytest.mark.parametrize("scale", [1e-9, 1e-30, 1e-40])
def test_regression_labels_that_are_too_close_are_refused(scale: float, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], [i * scale for i in range(40)])
    with pytest.raises(DataError, match=r"x\.csv:2:label: all labels are within .* too close"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_many_small_classes_keep_the_validation_share(tmp_path: Path) -> None:
    labels = [f"class {i % 200}" for i in range(600)]
    path = write_rows(tmp_path / "x.csv", [f"text number {i}" for i in range(600)], labels)
    found = load_data(train_file=path, cache_dir=tmp_path)
    assert len(found.splits["validation"]) == 60
    assert set(found.splits["train"]["labels"][:]) == set(range(200))


def test_texts_like_nan_are_reported_or_skipped(tmp_path: Path) -> None:
    words = {3: "N/A", 5: "nan", 6: "#REF!"}
    texts = [words.get(i, f"text {i}") for i in range(40)]
    path = write_rows(tmp_path / "x.csv", texts, ["a", "b"] * 20)
    for allowed in (False, True):  # `audit` allows empty texts, to count them
        found = load_data(train_file=path, cache_dir=tmp_path, allow_empty_text=allowed)
        [note] = [note for note in found.notes if "They are used as text" in note]
        assert note.startswith(f"Warning: 3 train texts are only '#ref!' or 'n/a' or 'nan' (first: {path}:5)")
    skipped = load_data(train_file=path, cache_dir=tmp_path, skip_bad_rows=True)
    assert [row.where for row in skipped.bad_rows] == [f"{path}:5", f"{path}:7", f"{path}:8"]


def make_part(rows: int, classes: int = 3, repeat: int = 1) -> Part:
    texts = [f"text {i // repeat}" for i in range(rows)]
    labels = [0 if i % 10 else 1 + i % (classes - 1) for i in range(rows)]
    return Part.of(Dataset.from_dict({"text": texts, "labels": labels}))


def test_folds_are_stratified_and_contain_every_row_once() -> None:
    part = make_part(103)
    held_out = [draw_fold(part, folds=5, fold=k, task=Task.MULTICLASS)[1] for k in range(1, 6)]
    assert sorted(np.concatenate(held_out)) == list(range(103))
    labels = np.asarray(part.labels())
    for label in range(3):
        counts = [int((labels[rows] == label).sum()) for rows in held_out]
        assert max(counts) - min(counts) <= 1, f"label {label}: {counts}"
    train, other = draw_fold(part, folds=5, fold=1, task=Task.MULTICLASS)
    assert sorted([*train, *other]) == list(range(103))


def test_rows_that_share_a_sentence_are_in_one_fold() -> None:
    part = make_part(90, repeat=3)
    for fold in (1, 2, 3):
        _, rows = draw_fold(part, folds=3, fold=fold, task=Task.MULTICLASS, text_columns=("text",))
        assert len(rows) == 3 * len({r // 3 for r in rows})


@pytest.mark.parametrize("name", ["", "../etc", "a/b/c", "two words", "https://huggingface.co/datasets/glue"])
def test_invalid_hub_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a Hub dataset"):
        load_dataset(name)


def test_estimator_refuses_a_column_that_equals_the_target() -> None:
    frame = pd.DataFrame({"review": [f"text {i}" for i in range(40)], "label": ["a", "b"] * 20})
    with pytest.raises(DataError, match="the text column 'label' equals the labels"):
        TextClassifier().fit(frame, frame["label"])


COPIES: dict[str, tuple[Any, list[str]]] = {
    "other case": (["a", "b"] * 20, ["A", "B"] * 20),
    "ids": ([0, 1] * 20, ["no", "yes"] * 20),
    "lists": ([["a"], ["a", "b"]] * 20, ["a", "a;b"] * 20),
    "numbers": ([k + 0.1 for k in range(40)], [f"{k}.10" for k in range(40)]),
}


@pytest.mark.parametrize("kind", COPIES)
def test_text_column_that_renames_the_target_is_refused(kind: str) -> None:
    target, copy = COPIES[kind]
    frame = pd.DataFrame({"review": [f"text {i}" for i in range(40)], "copy": copy})
    model = TextRegressor() if kind == "numbers" else TextClassifier()
    with pytest.raises(DataError, match="'text_2' duplicates the label in all 40 rows"):
        model.fit(frame, target)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_keep_their_line_without_bad_rows_and_in_splits(kind: str, tmp_path: Path) -> None:
    texts = [f"the {WORDS[i % 8]} thing number {i}" if i % 7 else "" for i in range(60)]
    splits = ["test" if i % 5 == 0 else "train" for i in range(60)]
    frame = pd.DataFrame({"text": texts, "label": ["a", "b"] * 30, "split": splits})
    path = tmp_path / f"x.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    bundle = load_data(train_file=str(path), cache_dir=tmp_path, skip_bad_rows=True)
    assert set(bundle.parts) == {"train", "validation", "test"}
    first = 2 if kind == "csv" else 1  # the header is line 1
    for split, part in bundle.parts.items():
        lines = part.line_numbers(len(part))
        assert [texts[line - first] for line in lines] == list(bundle.splits[split]["text"])
        assert part.where(3) == f"{path}:{lines[3]}"
