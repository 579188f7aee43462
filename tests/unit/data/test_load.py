"""From files to splits: columns and task are found and explained, labels go by name, splits are honest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from data_loading import load_data
from tunesmith.config.options import RunConfig
from tunesmith.data.columns import Columns, infer_columns
from tunesmith.data.in_memory import labelled_table
from tunesmith.data.read import DataBundle, read_labelled, read_source, read_unlabelled
from tunesmith.data.source import Part
from tunesmith.data.split import draw_split
from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import LabelMap, Task

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
    return infer_columns({"train": read_source(data, name="train")}, RunConfig(**options))


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
def test_pairs_are_known_by_their_names(pair: tuple[str, str]) -> None:
    data = [{"idx": str(i), "label": "ab"[i % 2], pair[1]: f"b {i}", pair[0]: f"a {i}"} for i in range(4)]
    found = columns_of(data)
    assert (found.text, found.label, found.task) == (pair, "label", Task.BINARY)
    assert all(why.endswith(".") for why in found.why)
    assert found.why[3:] == ("Not used: 'idx'.",)


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
def test_other_columns_are_found_by_what_they_hold(row: dict[str, str], text: Any, label: Any) -> None:
    data = [{**row, list(row)[-1]: "xy"[i % 2]} for i in range(6)]
    if text is None:
        with pytest.raises(DataError, match=r"which column holds the text .*--label_column_name pos_tag"):
            columns_of(data)
    else:
        found = columns_of(data)
        assert (found.text, found.label) == (text, label)


def test_what_the_user_names_wins() -> None:
    data = [{"text": "a b", "other": "c d", "label": "x", "stars": str(i % 5)} for i in range(10)]
    found = columns_of(data, text_column_names="other, text", label_column_name="stars", do_regression=True)
    assert (found.text, found.label, found.task) == (("other", "text"), "stars", Task.REGRESSION)
    with pytest.raises(ConfigError):
        columns_of(data, text_column_names="a,b,c")
    with pytest.raises(ConfigError, match="Did you mean 'mrpc'"):
        columns_of(data, task_name="mrcp")


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
def test_the_task_follows_from_the_labels(labels: list[Any], task: Task) -> None:
    assert columns_of(rows(12, labels)).task is task


def test_label_ids_go_by_name_in_every_split(load: Callable[..., DataBundle]) -> None:
    train = rows(20, ["neg", "pos"])
    bundle = load(train, validation_data=rows(3, ["pos"]), test_data=rows(4, ["-1"]))
    assert bundle.labels == LabelMap(("neg", "pos"), Task.BINARY)
    assert bundle.splits["train"]["labels"][:4] == [0, 1, 0, 1]
    assert bundle.splits["validation"]["labels"][:] == [1, 1, 1]
    assert bundle.splits["test"]["labels"][:] == [-1] * 4
    assert any("4 of 4 test rows are unlabeled" in note for note in bundle.notes)


def test_two_class_labels_in_other_orders_are_joined_by_name(load: Callable[..., DataBundle]) -> None:
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
def test_names_and_their_order(
    labels: Any, options: Any, names: Any, first: Any, load: Callable[..., DataBundle]
) -> None:
    bundle = load(rows(30, labels), validation_split_fraction=0, **options)
    assert bundle.labels.names == names
    assert bundle.splits["train"]["labels"][: len(first)] == first


def test_regression_and_multilabel_are_encoded_as_the_loss_wants_them(load: Callable[..., DataBundle]) -> None:
    bundle = load(rows(20, ["0.5", "2", "-1e1"]), test_data=rows(2, ["-1"]))
    assert bundle.labels == LabelMap(("label",), Task.REGRESSION)
    assert bundle.splits["train"].features["labels"] == Value("float32")
    assert np.isnan(bundle.splits["test"]["labels"][:]).all()
    bundle = load(rows(20, [["b"], [], ["a", "b"]]), validation_split_fraction=0)
    assert bundle.labels == LabelMap(("a", "b"), Task.MULTILABEL)
    assert bundle.splits["train"]["labels"][:3] == [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    bundle = load(rows(20, [[1.0, 0.0], [0.0, 1.0]]), label_names="x,y", validation_split_fraction=0)
    assert bundle.labels.names == ("x", "y")
    assert bundle.splits["train"].features["labels"] == List(Value("float32"))
    with pytest.raises(DataError, match="train:2:label: 1 values, expected 2"):
        load(rows(2, [[1.0, 0.0], [0.0]]))


def test_a_column_called_labels_is_replaced_by_the_ids(load: Callable[..., DataBundle]) -> None:
    bundle = load(rows(20, ["n", "y"], label="labels"), validation_split_fraction=0)
    assert bundle.splits["train"]["labels"][:2] == [0, 1]


def test_the_validation_split_is_stratified_seeded_and_said_aloud(load: Callable[..., DataBundle]) -> None:
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


def test_rows_that_share_a_sentence_stay_on_one_side() -> None:
    data = [{"a": f"s{i // 2}", "b": f"T{i}", "labels": i % 2} for i in range(400)]
    train, validation = split(data, "a", "b")
    assert not set(train["a"][:]) & set(validation["a"][:])
    assert validation.num_rows == 40
    assert train["b"][:] == sorted(train["b"][:], key=lambda t: int(t[1:])), "file order is kept"


def test_a_label_that_lives_in_one_large_group_is_still_evaluated() -> None:
    data = [{"text": "same", "labels": 0}] * 50 + [{"text": f"t{i}", "labels": 1} for i in range(50)]
    train, validation = split(data, "text")
    assert np.bincount(validation["labels"][:]).tolist() == [5, 5]
    assert train.num_rows == 90


def test_rows_that_are_nearly_all_linked_are_still_held_out(load: Callable[..., DataBundle]) -> None:
    """Every query with every answer: one group of 400 pairs, beside 6 pairs of their own."""
    linked = [(f"query {i % 40}", f"answer {i % 37}", i % 2) for i in range(400)]
    alone = [(f"lone query {i}", f"lone answer {i}", i % 2) for i in range(6)]
    data = [{"text": a, "text_pair": b, "label": ["no", "yes"][c]} for a, b, c in linked + alone]
    bundle = load(data, seed=3)
    assert bundle.splits["validation"].num_rows == 40, "a tenth, not the few pairs that are linked to no other"
    assert set(bundle.splits["validation"]["text"][:]) & set(bundle.splits["train"]["text"][:])
    (note,) = [note for note in bundle.notes if "held out" in note]
    assert "linked to train rows by a text" in note
    assert "kept together" not in note


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0])
def test_a_fraction_out_of_range_is_a_config_error(fraction: float, load: Callable[..., DataBundle]) -> None:
    with pytest.raises(ConfigError, match="validation_split_fraction"):
        load(rows(20, ["a", "b"]), validation_split_fraction=fraction)


def test_a_sample_keeps_the_shares_of_the_labels_and_every_class(load: Callable[..., DataBundle]) -> None:
    data = [{"text": f"text number {i}", "label": "rare" if i % 25 == 24 else "ab"[i % 2]} for i in range(100)]
    sorted_by_label = sorted(data, key=lambda row: row["label"])
    limits = {"max_train_samples": 10, "max_eval_samples": 25, "max_predict_samples": 3}
    bundle = load(sorted_by_label, validation_data=data, test_data=data, **limits)
    assert [bundle.splits[s].num_rows for s in ("train", "validation", "test")] == [10, 25, 3]
    counts = {s: Counter(bundle.splits[s]["label"][:]) for s in ("train", "validation", "test")}
    assert counts["validation"] == {"a": 12, "b": 12, "rare": 1}
    assert counts["train"]["rare"] == counts["test"]["rare"] == 1
    assert any(note.startswith("Only 10 of 100 train rows are used") for note in bundle.notes)
    again = load(sorted_by_label, validation_data=data, test_data=data, **limits)
    assert again.fingerprint == bundle.fingerprint
    assert (
        load(sorted_by_label, validation_data=data, test_data=data, **limits, seed=1).fingerprint != bundle.fingerprint
    )


def test_the_fingerprint_is_of_content_and_order(load: Callable[..., DataBundle], tmp_path: Path) -> None:
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


def test_a_part_scans_only_its_rows_whatever_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.data.files.CHUNK_BYTES", 64)
    monkeypatch.setattr("tunesmith.data.source.SCAN_ROWS", 3)
    data = [{"text": f"text {i}", "labels": str(i)} for i in range(50)]
    (tmp_path / "x.csv").write_text("text,labels\n" + "".join(f"{row['text']},{row['labels']}\n" for row in data))
    chosen = np.array([0, 7, 8, 9, 30, 49])
    for source in (read_source(tmp_path / "x.csv", name="train", cache_dir=tmp_path), read_source(data, name="train")):
        part = Part(source, source.dataset, chosen)
        tables = list(part.scan(["text"]))
        assert len(tables) > 5
        assert [t for table in tables for t in table["text"].to_pylist()] == [f"text {i}" for i in chosen]
        assert part.dataset()["text"][:] == [f"text {i}" for i in chosen]
        assert part.labels().to_pylist() == [str(i) for i in chosen]


def test_empty_text_is_kept_when_allowed(load: Callable[..., DataBundle]) -> None:
    data = [*rows(20, ["a", "b"]), {"text": "", "label": "a"}]
    with pytest.raises(DataError, match="train:21:text: the text is empty"):
        load(data)
    assert load(data, allow_empty_text=True, validation_split_fraction=0).splits["train"]["text"][20] == ""


def test_one_label_is_allowed_when_asked(load: Callable[..., DataBundle]) -> None:
    assert load(rows(20, ["a"]), allow_single_label=True).labels.names == ("a",)


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


def test_a_hub_task_asks_the_hub_room(load: Callable[..., DataBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(name: str, config: str | None = None, **options: Any) -> DatasetDict:
        asked.append((name, config, options))
        return DatasetDict({"train": Dataset.from_list(rows(20, [0, 1], text="sentence"))})

    monkeypatch.setattr("tunesmith.data.hub.load_from_hub", fake)
    bundle = load(None, task_name="sst2", allow_download=False)
    assert asked == [("glue", "sst2", {"allow_download": False})]
    assert bundle.labels.names == ("negative", "positive")
    load(None, dataset_name="some/data", dataset_config_name="c")
    assert asked[1] == ("some/data", "c", {"allow_download": True})


def test_a_saved_folder_is_a_dataset_name(load: Callable[..., DataBundle], tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(rows(20, ["a", "b"]))}).save_to_disk(tmp_path / "saved")
    assert load(None, dataset_name=str(tmp_path / "saved")).labels.names == ("a", "b")


def test_no_data_is_a_config_error_and_no_train_a_data_error() -> None:
    with pytest.raises(ConfigError, match="--train_file"):
        load_data()
    with pytest.raises(DataError, match="no train split, only test"):
        load_data(test_data=rows(2, ["a"]))


def test_rows_to_predict_keep_all_columns_and_rows_to_evaluate_use_the_models_names(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,text,note\n007,a b,NA\n8,c d,\n")
    source = read_unlabelled(path, text=("text",), cache_dir=tmp_path)
    assert source.column_names == ["id", "text", "note"]
    assert source.dataset["id"][:] == ["007", "8"]
    with pytest.raises(DataError, match="no column 'body'; found: id, text, note"):
        read_unlabelled(path, text=("body",), cache_dir=tmp_path)
    columns = Columns(("text",), "label", Task.BINARY)
    labels = LabelMap(("good", "bad"), Task.BINARY)
    got = read_labelled([{"text": "a b", "label": "bad"}], columns=columns, labels=labels)
    assert got["labels"][:] == [1]
    assert read_labelled([{"text": "a b", "label": 1}], columns=columns, labels=labels)["labels"][:] == [1]
    with pytest.raises(DataError, match="test:1:label: 'baad' is not one of good, bad"):
        read_labelled([{"text": "a b", "label": "baad"}], columns=columns, labels=labels)


def write_rows(path: Path, texts: list[str], labels: list[Any]) -> Path:
    path.write_text("text,label\n" + "".join(f"{t},{v}\n" for t, v in zip(texts, labels, strict=True)))
    return path


@pytest.mark.parametrize("labels", [[50_000_000 + 0.01 * i for i in range(40)], [1e-300 * i for i in range(1, 41)]])
def test_labels_that_float32_cannot_tell_apart_are_refused(labels: list[float], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], labels)
    with pytest.raises(DataError, match=r"x.csv:\d+:label: .* in 32 bits.*rescale them"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_time_stamps_as_regression_labels_are_refused(tmp_path: Path) -> None:
    labels = [1700000000000.5 + 1000 * i for i in range(40)]
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], labels)
    with pytest.raises(DataError, match=r"x.csv:2:label: .* is too large.* Rescale the labels"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_constant_regression_labels_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [f"text {i}" for i in range(40)], [0.5] * 40)
    with pytest.raises(DataError, match=r"all 40 rows have the label 0\.5: there is nothing to learn"):
        load_data(train_file=path, cache_dir=tmp_path, do_regression=True)


def test_many_small_classes_do_not_fill_the_validation_split(tmp_path: Path) -> None:
    labels = [f"class {i % 200}" for i in range(600)]
    path = write_rows(tmp_path / "x.csv", [f"text number {i}" for i in range(600)], labels)
    found = load_data(train_file=path, cache_dir=tmp_path)
    assert len(found.splits["validation"]) == 60
    assert set(found.splits["train"]["labels"][:]) == set(range(200))


def test_texts_that_stand_for_a_missing_value_are_reported_or_skipped(tmp_path: Path) -> None:
    texts = ["N/A" if i == 3 else "nan" if i == 5 else f"text {i}" for i in range(40)]
    path = write_rows(tmp_path / "x.csv", texts, ["a", "b"] * 20)
    found = load_data(train_file=path, cache_dir=tmp_path)
    [note] = [note for note in found.notes if "They are used as text" in note]
    assert note.startswith(f"Warning: 2 train texts are only 'n/a' or 'nan' (first: {path}:5)")
    skipped = load_data(train_file=path, cache_dir=tmp_path, skip_bad_rows=True)
    assert [row.where for row in skipped.bad_rows] == [f"{path}:5", f"{path}:7"]


def test_text_column_that_equals_the_labels_is_refused() -> None:
    labels = ["a", "b"] * 20
    table = {"review": [f"text {i}" for i in range(40)], "label": labels}
    with pytest.raises(DataError, match="the text column 'label' equals the labels"):
        labelled_table(table, labels)
