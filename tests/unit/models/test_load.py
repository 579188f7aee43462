"""A model folder whose files are wrong is refused in one line that names the field, before anything is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_model import save_tiny_bert, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.labels import LabelMap
from tunesmith.models.files import load_tokenizer, read_config_file
from tunesmith.models.load import load_model

LABELS = LabelMap.for_classes(("bad", "good"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    write_csv(root / "rows.csv", [{"text": "a good film", "label": "good"}, {"text": "a bad day", "label": "bad"}])
    return save_tiny_bert(root / "model", labels=LABELS.names)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def predict(folder: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["predict", str(folder), "--input", str(rows), "--text_column_names", "text", "--use_cpu"])
    return code, capsys.readouterr().err


HUGE = {
    "num_labels": 1_000_000_000,
    "max_position_embeddings": 1_000_000_000,
    "type_vocab_size": 1_000_000_000,
    "vocab_size": 2_000_000_000,
    "hidden_size": 2_000_000,
    "intermediate_size": 1_000_000_000,
    "num_hidden_layers": 1_000_000,
    "pad_token_id": 10**400,
}


@pytest.mark.parametrize("field", HUGE)
def test_a_huge_size_is_refused_by_name_before_it_is_allocated(
    field: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    if field == "num_labels":
        del config["id2label"]
    (folder / "config.json").write_text(json.dumps({**config, field: HUGE[field]}))
    code, said = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 2, said
    assert field in said
    assert "config.json" in said


def test_more_label_names_than_any_model_has_are_refused(folder: Path) -> None:
    change(folder / "config.json", id2label={str(i): "x" for i in range(100_001)})
    with pytest.raises(ConfigError, match=r"id2label asks for 100001 labels; the limit is 100000"):
        read_config_file(folder)


def other_families() -> Iterator[Any]:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 40, "id2label": LABELS.id2label}
    more = {
        "Roberta": {},
        "Albert": {"embedding_size": 16},
        "Electra": {"embedding_size": 16},
        "MPNet": {},
        "DebertaV2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]},
        "ModernBert": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    }
    for name, options in more.items():
        config = getattr(transformers, f"{name}Config")(**sizes, **options)
        yield getattr(transformers, f"{name}ForSequenceClassification")(config)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # DeBERTa, when it is imported
def test_no_number_of_a_config_of_any_family_makes_a_model_larger_than_its_weights(tmp_path: Path) -> None:
    for model in other_families():
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        assert load_model(folder, LABELS).notes == ()
        plain = json.loads((folder / "config.json").read_text())
        for field in [name for name, value in plain.items() if type(value) is int]:
            for value in (1_500_000_000, 0, -7):
                (folder / "config.json").write_text(json.dumps({**plain, field: value}))
                try:
                    loaded = load_model(folder, LABELS)
                except TunesmithError:
                    continue
                assert loaded.parameters < 2_000_000, (folder.name, field, value)


UNUSABLE: dict[str, tuple[Any, str]] = {
    "hidden_size": (0, "hidden_size is 0, not a positive whole number"),
    "num_attention_heads": (0, "describes no model"),
    "hidden_dropout_prob": (float("nan"), "NaN is not a number"),
    "attention_probs_dropout_prob": (1e999, "Infinity is not a number"),
    "initializer_range": ("much", "initializer_range"),
    "intermediate_size": (-64, "intermediate_size is -64"),
    "vocab_size": ("12", "vocab_size is '12'"),
    "num_hidden_layers": ([2], "num_hidden_layers"),
    "pad_token_id": (1_000_000_000, "describes no model .*[Pp]adding_idx"),
    "hidden_act": (None, "hidden_act"),
    "id2label": ([1], "id2label is not a table"),
    "is_decoder": ("\ud800", "half of a surrogate pair"),
}


@pytest.mark.parametrize("field", UNUSABLE)
def test_a_config_that_cannot_be_used_ends_with_exit_2_and_names_the_field(
    field: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    value, said = UNUSABLE[field]
    change(folder / "config.json", **{field: value})
    code, shown = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 2, shown
    assert re.search(said, shown), shown
    assert str(folder) in shown


def test_feed_forward_chunks_do_not_bind_the_length_of_rows(
    folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "config.json", chunk_size_feed_forward=3)
    code, said = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 0, said


def test_a_position_table_of_another_size_is_told_as_such(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=8)
    for allowed in (False, True):
        with pytest.raises(ConfigError, match=r"position_embeddings.*\(max_position_embeddings is 8\)") as error:
            load_model(folder, LABELS, ignore_mismatched_sizes=allowed)
        assert "labels" not in str(error.value)


def test_a_head_of_another_size_is_still_a_matter_of_labels(folder: Path) -> None:
    three = LabelMap.for_classes(("a", "b", "c"))
    with pytest.raises(ConfigError, match="trained for 2 labels and the data has 3"):
        load_model(folder, three)
    assert "classifier.weight" in load_model(folder, three, ignore_mismatched_sizes=True).notes[0]


def test_a_model_that_answers_with_no_number_ends_with_exit_6(
    folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "config.json", layer_norm_eps=-1e30)
    code, said = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 6, said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_max_length", "long"),
        ("model_max_length", 0.5),
        ("model_max_length", -1),
        ("padding_side", "up"),
        ("truncation_side", 7),
        ("model_input_names", ["types"]),
        ("pad_token", 3),
        ("tokenizer_class", [1]),
        ("added_tokens_decoder", {"0": None}),
    ],
)
def test_a_tokenizer_with_settings_that_cannot_be_used_is_refused(folder: Path, field: str, value: Any) -> None:
    change(folder / "tokenizer_config.json", **{field: value})
    with pytest.raises(ConfigError, match=str(folder)):
        load_tokenizer(folder)


def test_loading_draws_no_random_number_and_does_not_change_the_weights(folder: Path) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model(folder, LABELS)
    assert torch.equal(torch.rand(4), expected)
